"""Ranks of one machine compile each graph once, and a warm start compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.reference import Plain, judge
from zeroweave.demo import Llama, LlamaConfig

pytestmark = pytest.mark.matrix


def llama(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocabulary=32, width=16, hidden=32, layers=layers, heads=2, max_length=16))


def train(layers: int, lower: str) -> tuple[Any, tuple[float, str]]:
    """The stats after two steps, and what `judge` says of the first step's gradients."""
    model, plain = llama(layers), Plain(llama(layers))
    ids = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    plain.each(lambda net: net(ids, ids).loss.backward())
    expected = plain.average()
    config = {"compile": {"lower": lower}, "deadline_seconds": 200.0}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        for step in range(2):
            engine.backward(engine(ids, ids).loss)
            if step == 0:
                difference = judge(engine.gradients(), expected)
            engine.step()
        return engine.stats, difference


def with_cache(folder: str) -> tuple[int, int, int, float]:
    """Templates, those of them that the cache had, and Inductor's own count of misses and bypasses."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    torch._dynamo.utils.counters.clear()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        stats, difference = train(2, "inductor")
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    inductor = torch._dynamo.utils.counters["inductor"]
    misses = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return stats.templates, stats.found_templates, misses, difference[0]


def test_one_rank_compiles_and_the_other_finds(pools: Pools, tmp_path: Path) -> None:
    cold = pools(2).run(with_cache, str(tmp_path))
    templates = cold[0][0]
    assert templates > 2 and [rank[0] for rank in cold] == [templates] * 2
    assert sum(rank[2] for rank in cold) == templates, cold
    assert all(found == templates - misses for templates, found, misses, _ in cold)
    warm = pools(2).run(with_cache, str(tmp_path))
    assert [rank[:3] for rank in warm] == [(templates, templates, 0)] * 2
    assert max(rank[3] for rank in cold + warm) <= 1


def compilations(layers: int) -> tuple[int, int, list[str]]:
    stats, _ = train(layers, "aot_eager")
    phases = [name for name, seconds in stats.compile_seconds.items() if seconds > 0]
    return stats.graphs, stats.templates, phases


def test_the_number_of_compilations_does_not_depend_on_the_number_of_blocks(pools: Pools) -> None:
    few, more, many = (pools(2).run(compilations, layers) for layers in (8, 16, 32))
    assert few == more == many
    for graphs, templates, phases in few:
        assert graphs <= 3 and templates <= 16
        assert {"dynamo", "aot", "partition", "lower"} <= set(phases)
