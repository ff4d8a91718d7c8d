"""Reduce buckets over real ranks: equal bits, extremes of float16, and bytes counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.counting import Dispatched
from tests.support.dc_world import SHAPES, World, draw
from tests.support.harness import Pools
from tests.support.marks import slow
from zeroweave import dc
from zeroweave.errors import AgreementError

matrix = pytest.mark.matrix


def bits(stage: int, double_buffer: bool, bucket: int) -> tuple[list[Tensor], int, float]:
    """A window's gradients, the most bytes of staging, and the difference."""
    with World(stage, "cut", {"double_buffer": double_buffer}, bucket) as world:
        for micro in range(3):
            world.micro_step(micro, update=micro == 2)
        return world.gradients(), world.ledger.gauge("reduce buckets").peak, world.difference()


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=matrix) for stage in (1, 2, 3)])
def test_double_buffering_and_bucket_sizes_change_no_bit(pools: Pools, stage: int) -> None:
    first: list[list[Tensor]] | None = None
    peaks = {}
    for double in (False, True):
        for bucket in (1, 40, 100_000):
            found = pools(2).run(bits, stage, double, bucket)
            assert max(difference for _, _, difference in found) <= 1
            peaks[double, bucket] = found[0][1]
            gradients = [each for each, _, _ in found]
            first = first or gradients
            for ours, theirs in zip(gradients, first, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert peaks[False, 1] < peaks[True, 1]
    largest = 4 * 150  # the gradient that is larger than any bucket makes one larger flat
    assert largest <= peaks[False, 1] <= largest + 2 * 128


EXTREMES = {"large": 60_000.0, "subnormal": 2.0**-24}


def extremes(value: float, config: dict[str, Any], held: str, buffer: torch.dtype) -> float:
    """The reduced gradient where every rank's is `value` in float16."""
    with World(2, held, config, shapes=[(70,)], buffer_dtype=buffer) as world:
        world.runtime.start_backward(True)
        world.runtime.reduce_grad(torch.full((70,), value, dtype=torch.float16), 0, 0)
        world.runtime.end_backward(0)
        (gradient,) = world.gradients()
        assert bool((gradient == gradient[0]).all())
        return float(gradient[0])


@pytest.mark.parametrize("held", [pytest.param("whole", marks=matrix), "cut", pytest.param("taken", marks=matrix)])
@pytest.mark.parametrize(
    ("extreme", "pre_div", "reduce_dtype", "result"),
    [
        ("large", True, None, 60_000.0),
        ("large", False, None, float("inf")),  # the sum overflows before the backend divides it
        ("large", False, "float32", 60_000.0),
        ("large", True, "float32", 60_000.0),
        ("subnormal", True, None, 0.0),  # half of the least subnormal number rounds to zero, before the sum
        ("subnormal", False, None, 2.0**-24),
        ("subnormal", True, "float32", 2.0**-24),
        ("subnormal", False, "float32", 2.0**-24),
    ],
)
def test_extremes_of_float16(
    pools: Pools, held: str, extreme: str, pre_div: bool, reduce_dtype: str | None, result: float
) -> None:
    """Dividing first saves large values and loses small ones; averaging the other way round; float32 loses none.

    gloo's average is the sum divided by the number of ranks.
    """
    config = {"pre_div_reduce": pre_div, "reduce_dtype": reduce_dtype}
    found = pools(2).run(extremes, EXTREMES[extreme], config, held, torch.float16)
    assert found == [result, result]


def traffic(stage: int, held: str, gas: int) -> dict[str, Any]:
    """A window's collectives as the dispatcher and the ledger tell them."""
    with World(stage, held, bucket=60) as world:
        for first in (0, 10):
            world.ledger.begin_step()
            with Dispatched() as independent:
                for micro in range(gas):
                    runtime = world.runtime
                    runtime.start_backward(micro == gas - 1)
                    for i, p in enumerate(world.mine):
                        runtime.reduce_grad(draw(1 + world.rank, first + micro, i, shape=p.shape), 0, i)
                runtime.end_backward(0)
            if held == "taken":
                runtime.take_gradients().release()
        return {
            "independent": independent.found,
            "ledger": world.ledger.step(),
            "elements": sum(p.numel() for p in world.mine),
        }


@pytest.mark.parametrize("gas", [pytest.param(1, marks=matrix), 3])
@pytest.mark.parametrize(("stage", "held"), [(1, "cut"), (1, "taken"), (2, "cut"), (2, "taken"), (3, "cut")])
def test_bytes_of_reduce_scatters(pools: Pools, stage: int, held: str, gas: int) -> None:
    """The wire sees half of what an all-reduce of the same padded bytes costs, once a window or once a backward."""
    world, times = 2, 1 if stage == 1 else gas
    for found in pools(2).run(traffic, stage, held, gas):
        assert {kind for kind, _ in found["independent"]} == set(found["ledger"]) == {"reduce_scatter"}
        padded = 4 * sum(numel for _, numel in found["independent"])
        ledger = found["ledger"]["reduce_scatter"]
        assert (ledger.calls, ledger.payload) == (len(found["independent"]), padded)
        assert ledger.wire == padded * (world - 1) // world
        slack = 128 * 2 * world * len(SHAPES) + found["elements"] // 2
        assert times * 4 * found["elements"] <= padded <= times * (4 * found["elements"] + slack)


def whole_and_parts() -> list[dict[str, Any]]:
    return [traffic(2, "whole", 1), traffic(2, "taken", 1)]


@pytest.mark.matrix
def test_half_of_an_all_reduce(pools: Pools) -> None:
    for whole, parts in pools(2).run(whole_and_parts):
        (kind,) = {kind for kind, _ in whole["independent"]}
        assert kind == "all_reduce" and set(whole["ledger"]) == {"all_reduce"}
        reduced, scattered = whole["ledger"]["all_reduce"], parts["ledger"]["reduce_scatter"]
        assert reduced.payload == 4 * sum(numel for _, numel in whole["independent"])
        # Both by what each pads: the parts of two ranks are padded apart.
        assert reduced.wire / reduced.payload == 2 * scattered.wire / scattered.payload == 1.0


def bfloat16_windows(gas: int) -> tuple[int, int, list[float]]:
    """Bytes that a window of ZeRO-1 sends by the ledger and by the dispatcher, and values of its sum."""
    runtime = dc.Runtime(None, None, 1000)
    try:
        runtime.register_param(0, [300], torch.zeros(300, dtype=torch.bfloat16))
        runtime.register_graph_z1(0, [0])
        with Dispatched() as independent:
            for micro in range(gas):
                runtime.start_backward(micro == gas - 1)
                value = 256.0 if micro == 0 else 1.0
                runtime.reduce_grad(torch.full((300,), value, dtype=torch.bfloat16), 0, 0)
            runtime.end_backward(0)
        taken = runtime.take_gradients()
        values = taken.view(0).unique().tolist()
        taken.release()
        ((_, numel),) = independent.found
        return runtime.ledger.totals()["reduce_scatter"].wire, 2 * numel, values
    finally:
        runtime.cleanup()


@slow("3")
@pytest.mark.parametrize("gas", [1, 3])
def test_local_sums_are_exact_and_travel_as_their_gradients_do(pools: Pools, gas: int) -> None:
    """Added up in bfloat16, 256 + 1 + 1 would be 256. What is sent is half of the padded bytes, as without sums."""
    for wire, padded, values in pools(2).run(bfloat16_windows, gas):
        assert values == [256.0 + gas - 1]
        assert wire == padded // 2 and 600 <= padded <= 600 + 4 * 128


def several_ends(release: bool | None) -> tuple[int, float]:
    """ZeRO-1: two graphs, each with an end of its own in the updating backward; collectives, and the difference."""
    with World(1, "cut", bucket=1000, graphs={0: [0, 1], 1: [2, 3, 4]}) as world:
        world.micro_step(0, update=False)
        world.runtime.start_backward(True)
        for graph_id, more in ((0, True), (1, False)):
            uses = [(graph_id, i) for i in world.graphs[graph_id]]
            world.loss(1, uses).backward()
            world.plain_backward(1, uses)
            world.runtime.end_backward(graph_id, release if more else None)
        return world.ledger.totals()["reduce_scatter"].payload, world.difference()


def test_sums_of_graphs_that_are_still_to_come_wait_for_them(pools: Pools) -> None:
    """Where the caller says so. Without a word nobody knows whether they will come, and everything is reduced."""
    told, untold = pools(2).run(several_ends, False), pools(2).run(several_ends, None)
    assert max(difference for _, difference in told + untold) <= 1
    assert 1.5 * told[0][0] < untold[0][0]


class HandsIn(torch.autograd.Function):
    """A backward that hands in gradients of these ids, each 10 * id, and ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, runtime: dc.Runtime, ids: list[int]) -> Tensor:
        ctx.runtime, ctx.ids = runtime, ids
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hand_in(ctx.runtime, ctx.ids)
        ctx.runtime.end_backward(0)
        return grad, None, None


def hand_in(runtime: dc.Runtime, ids: list[int]) -> None:
    for i in ids:
        runtime.reduce_grad(torch.full((8,), 10.0 * i), 0, i)


def disagreeing(here: list[int], there: list[int], bucket: int, where: str) -> tuple[list[float], str]:
    """A backward in which rank 0 hands in `here` and rank 1 `there`, of equal sizes; what `check_every_step` says."""
    runtime = dc.Runtime(None, {"check_every_step": True}, bucket)
    try:
        buffers = [torch.full((8,), float("nan")) for _ in range(3)]
        for i in range(3):
            runtime.register_param(i, [8], torch.zeros(8), buffers[i])
        runtime.register_graph_z2(0, range(3))
        for ids in (here, there if dist.get_rank() else here):
            said = ""
            runtime.start_backward(where != "no end")
            try:
                if where == "autograd":
                    HandsIn.apply(torch.ones(1, requires_grad=True), runtime, ids).backward()
                else:
                    hand_in(runtime, ids)
                    if where == "no end":
                        runtime.start_backward(False)
                    else:
                        runtime.end_backward(0)
            except AgreementError as error:
                said = str(error)
        return [float(b[0]) for b in buffers], said
    finally:
        runtime.cleanup()


@pytest.mark.parametrize("where", ["by hand", "autograd", "no end"])
@pytest.mark.parametrize(
    ("here", "there", "bucket"),
    [([0, 1], [1, 0], 1), ([0, 1], [0, 2], 1000)],
    ids=["another order of buckets", "others in one bucket"],
)
def test_other_reductions_on_another_rank_are_told(
    pools: Pools, here: list[int], there: list[int], bucket: int, where: str
) -> None:
    """In the backward in which they happen, although all have equal sizes."""
    for _, said in pools(2).run(disagreeing, here, there, bucket, where):
        assert "equally many, but others or in another order" in said


def test_the_order_inside_a_bucket_is_of_no_account(pools: Pools) -> None:
    for buffers, said in pools(2).run(disagreeing, [0, 1, 2], [0, 2, 1], 1000, "by hand"):
        assert buffers == [0.0, 10.0, 20.0] and said == ""
