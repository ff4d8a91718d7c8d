"""Pretrained models of transformers, straight from their files into shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from zeroweave.engine import Engine
from zeroweave.engine.arguments import OptimizerLike
from zeroweave.engine.assembly import initialize
from zeroweave.errors import UnsupportedError
from zeroweave.integrations.converted import converted


def load_pretrained(
    path: str | os.PathLike[str],
    config: Any = None,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: Any = None,
    make: Callable[..., torch.nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Engine:
    """The engine of a model of transformers, of which no rank ever holds more than its shards and one bucket.

    `path`: a folder with `config.json` and safetensors files, such as `save_pretrained` and `Engine.export` write.
    `config`, `lr_scheduler`: as for `initialize`. `optimizer`: a callable from parameters to one, or None for
    evaluation. `make(config, **options)` makes the model, such as `AutoModelForSequenceClassification.from_config`;
    None: `AutoModelForCausalLM.from_config`. `dtype`: of the parameters; None: what the folder's config says.
    Collective.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UnsupportedError(
            "[ZW803] load_pretrained() needs transformers: pip install 'zeroweave[examples]'"
        ) from None
    described = AutoConfig.from_pretrained(path)
    if (wanted := dtype or getattr(described, "dtype", None)) is not None:
        options["dtype"] = wanted
    with torch.device("meta"):
        model = (make or AutoModelForCausalLM.from_config)(described, **options)
    weights = converted(model, path)
    if weights is not None:
        weights.give_buffers()
    return initialize(model, optimizer, config, lr_scheduler, weights=path if weights is None else weights)
