"""The model of a plan and a batch of it, on `meta`: of a transformers config, or of a function."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroweave.errors import EngineError

Source = Callable[[], tuple[nn.Module, Any]]


def source_of(model: str, micro_batch: int, seq: int) -> Source:
    """What makes the model, and a batch as `Engine.train_step` takes it, on `meta`: new ones in each call.

    `model`: a config.json of transformers, or a folder with one, of a causal language model, which is given tokens and
    labels [micro_batch, seq]; or "module:function", of which `function(micro_batch, seq)` returns both. EngineError
    where it is neither.
    """
    path = Path(model)
    if path.exists():
        return _transformers(path / "config.json" if path.is_dir() else path, micro_batch, seq)
    try:
        function = pkgutil.resolve_name(model) if ":" in model else None
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineError(f"[ZW901] {model!r} cannot be imported: {error}") from None
    if not callable(function):
        raise EngineError(f"[ZW901] {model!r} is no file, no folder, and no function as 'module:function'")

    def made() -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            found = function(micro_batch, seq)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
            raise EngineError(
                f"[ZW901] {model}(micro_batch, seq) must return (a module, a batch), not {type(found).__name__}"
            )
        return found

    return made


def _transformers(path: Path, micro_batch: int, seq: int) -> Source:
    if not path.is_file():
        raise EngineError(f"[ZW901] {path.parent} has no config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise EngineError(
            f"[ZW901] {path} is a config of transformers, which is not installed: pip install 'zeroweave[examples]'"
        ) from None
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"[ZW901] {path}: {error}") from None

    config.use_cache = False  # no training has one: the engine would pass this, with a warning for each plan

    def made() -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config)
            except ValueError as error:
                raise EngineError(
                    f"[ZW901] {path}: no causal language model ({error}); give a 'module:function'"
                ) from None
            tokens = torch.zeros(micro_batch, seq, dtype=torch.long)
        return model.train(), {"input_ids": tokens, "labels": tokens}

    return made
