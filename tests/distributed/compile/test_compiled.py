"""What is compiled, and what the engine says where Dynamo gives up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.hf_models import SIZES
from tests.support.models import entry
from tests.support.odd_models import BEYOND_LIMIT
from tests.support.reference import build
from tests.support.zoo import Entry, huggingface, tokens

pytestmark = pytest.mark.matrix


def trained(model: Entry, steps: int = 3, **more: Any) -> tuple[Any, list[str]]:
    """The stats after some compiled steps, and the messages of warnings. `more` are keys of `compile`."""
    config = {"compile": {"lower": "aot_eager", **model.config.get("compile", {}), **more}}
    module = build(model)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with zw.initialize(module, optimizer, config) as engine:
            for index in range(steps):
                model.micro(engine, engine.module, model.batch(dist.get_rank(), index), engine.backward)
                engine.step()
            return engine.stats, [str(warning.message) for warning in caught]


def beyond_the_limit() -> tuple[dict[str, str], list[str], int]:
    stats, messages = trained(entry("layer_index"))
    return stats.eager_regions, [text for text in messages if "eager" in text], stats.compiled_calls


def test_blocks_beyond_the_recompile_limit_are_counted_and_reported_once(pools: Pools) -> None:
    told, *others = pools(2).run(beyond_the_limit)
    for regions, _, compiled in (told, *others):
        assert regions.keys() == BEYOND_LIMIT and all("limit" in reason for reason in regions.values())
        assert compiled == 3 * 2 * (12 - len(BEYOND_LIMIT))
    (message,) = told[1]
    assert "blocks.8" in message and "What differs between the copies: module.index (0, 1, 2, 3, …)." in message
    assert not any(messages for _, messages, _ in others)


def within_the_limit() -> tuple[dict[str, str], int]:
    stats, _ = trained(entry("layer_index"), recompile_limit=12)
    return stats.eager_regions, stats.graphs


def test_a_higher_limit_lets_them_all_be_compiled(pools: Pools) -> None:
    for regions, graphs in pools(2).run(within_the_limit):
        assert not regions and graphs == 12


def llama_of(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": layers}))


def transformers_layers(layers: int) -> tuple[dict[str, str], int, int, list[str]]:
    stats, messages = trained(Entry("llama", lambda: llama_of(layers), tokens, huggingface))
    return stats.eager_regions, stats.graphs, stats.templates, [text for text in messages if "use_cache" in text]


def test_all_layers_of_a_transformers_model_share_one_template(pools: Pools) -> None:
    """Called as its users call it: the engine passes `use_cache=False` and says so once."""
    few, many = (pools(2).run(transformers_layers, layers)[0] for layers in (4, 12))
    assert few[0] == many[0] == {} and few[1:3] == many[1:3]
    assert len(many[3]) == 1
