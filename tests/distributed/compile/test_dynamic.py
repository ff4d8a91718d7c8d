"""Sequences of many lengths, other ones on each rank: exact, with one static and one symbolic graph per template."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.models import Decoder, TokenDropoutBlock
from tests.support.reference import Plain, build, draw, judge
from tests.support.zoo import Entry, next_token, tokens

pytestmark = pytest.mark.matrix

LENGTHS = (16, 24, 9, 33)
MICRO_STEPS = 2 * len(LENGTHS)


def of_many_lengths(rank: int, index: int) -> Tensor:
    return tokens(rank, index, LENGTHS[(index + rank) % len(LENGTHS)])


MODEL = Entry("of_many_lengths", lambda: Decoder(TokenDropoutBlock), of_many_lengths, next_token)


@dataclass(frozen=True)
class Found:
    """Differences of all gradients, and what was compiled."""

    differences: list[tuple[float, str]]
    graphs: int
    templates: int
    found: int
    misses: int
    compiled_calls: int
    eager_regions: dict[str, str]


@contextmanager
def inductor(folder: str | None) -> Iterator[None]:
    """Inductor with a cache of its own and with eager's random numbers, for the comparison."""
    if folder is None:
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        with torch._inductor.config.patch(fallback_random=True):
            yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def train(stage: int, gas: int, folder: str | None, dynamic: bool | None) -> Found:
    """Trains with learning rate 0 under the engine and beside it; under Inductor if there is a folder."""
    with inductor(folder):
        rank, plain, model = dist.get_rank(), Plain(build(MODEL)), build(MODEL)
        torch._dynamo.utils.counters.clear()
        differences = []
        config = {
            "stage": stage,
            "gradient_accumulation_steps": gas,
            "deadline_seconds": 200.0,
            "compile": {"lower": "aot_eager" if folder is None else "inductor", "dynamic": dynamic},
        }
        with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), config) as engine:
            for index in range(MICRO_STEPS):
                batch = MODEL.batch(rank, index)
                draw(rank, index)
                plain.each(lambda net, batch: MODEL.micro(net, net, batch, lambda loss: (loss / gas).backward()), batch)
                draw(rank, index)
                MODEL.micro(engine, model, batch, engine.backward)
                if index % gas == gas - 1:
                    differences.append(judge(engine.gradients(), plain.average()))
                    plain.zero_grad()
                engine.step()
            stats = engine.stats
    counts = torch._dynamo.utils.counters["inductor"]
    return Found(
        differences=differences,
        graphs=stats.graphs,
        templates=stats.templates,
        found=stats.found_templates,
        misses=counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"],
        compiled_calls=stats.compiled_calls,
        eager_regions=stats.eager_regions,
    )


def check(ranks: list[Found]) -> None:
    """Exact, with at most two compilations of each template. `dynamic=True` may need a second one as well: a first
    length that equals the width is taken for the same size."""
    for found in ranks:
        assert max(found.differences)[0] <= 1, found.differences
        assert not found.eager_regions and found.compiled_calls == MICRO_STEPS * 4 * 2
        assert found.graphs <= 2 and found.templates == 2 * found.graphs


ROWS = [pytest.param(3, 2, None, marks=pytest.mark.oldest), (2, 1, None), (1, 2, True), (3, 1, True)]


@pytest.mark.parametrize(("stage", "gas", "dynamic"), ROWS)
def test_lengths_in_turn_and_other_ones_on_each_rank(pools: Pools, stage: int, gas: int, dynamic: bool | None) -> None:
    check(pools(2).run(train, stage, gas, None, dynamic))


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_same_with_a_cold_and_a_warm_cache(pools: Pools, tmp_path: Path, dynamic: bool | None) -> None:
    cold, warm = (pools(2).run(train, 3, 2, str(tmp_path), dynamic) for _ in range(2))
    for ranks in (cold, warm):
        check(ranks)
    assert all(found.misses == 0 and found.found == found.templates for found in warm), warm
