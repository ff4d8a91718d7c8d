"""The figures that the demo compares the engine's with."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from zeroweave._torch.distributed import all_gather_together, reduce_scatter_together
from zeroweave.demo import measure
from zeroweave.demo.measure import Count
from zeroweave.layout import ParameterSpec, build_layout
from zeroweave.schedule import BucketFacts, Call, Entered, Event, Facts, Left, Micro, Ready, compile_schedule


def spec(
    name: str, *shape: int, block: str | None = None, dtype: str = "float32", trained: bool = True
) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, 4 if dtype == "float32" else 2, trained, block)


def test_collectives_are_counted_by_the_profiler() -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def step() -> None:
            gather(torch.empty(16), torch.ones(16), async_op=True).wait()
            gather(torch.empty(8), torch.ones(8))
            reduce(torch.empty(4), torch.ones(4), op=dist.ReduceOp.AVG)
            dist.all_reduce(torch.ones(3))
            group = dist.group.WORLD
            assert group is not None
            all_gather_together([torch.empty(2), torch.empty(10)], [torch.ones(2), torch.ones(10)], group).wait()
            reduce_scatter_together([torch.empty(6)], [torch.ones(6)], dist.ReduceOp.SUM, group).wait()

        counts = measure.profiled(step)
    finally:
        dist.destroy_process_group()
    assert counts == {"all_gather": Count(4, 144), "reduce_scatter": Count(2, 40), "all_reduce": Count(1, 12)}


def test_the_state_of_a_small_model() -> None:
    specs = [spec("a", 100, 10, block="l.0"), spec("b", 7, block="l.0"), spec("c", 100, block="l.1")]
    buckets = build_layout(specs, world=2, max_bytes=1 << 30)
    assert [bucket.numel for bucket in buckets] == [1088, 128]
    one, two = (measure.state_bound(buckets, rank, stage=3, prefetch=0, depth=1) for rank in (0, 1))
    assert (one.shards, one.gradients) == (2432, 2432)
    # Rank 0: 544 of a and 64 of c; rank 1: 456 of a, all 7 of b, 36 of c. Each fragment has a step count.
    assert (one.optimizer, two.optimizer) == (8 * 608 + 4 * 2, 8 * 499 + 4 * 3)
    assert (one.flats_peak, one.gradient_flats_peak) == (4352, 4352)
    kept = measure.state_bound(buckets, 0, stage=2, prefetch=0, depth=2)
    assert kept.flats_peak == kept.gradient_flats_peak == 4352 + 512


def test_the_peaks_of_a_schedule() -> None:
    buckets = build_layout([spec("a", 64, block="l.0"), spec("b", 32, block="l.1")], world=2, max_bytes=1 << 30)
    first, second = (bucket.nbytes for bucket in buckets)
    facts = Facts(
        tuple(BucketFacts(b.id, b.name, b.nbytes, b.trainable) for b in buckets),
        kept_by_stage=frozenset(),
        depth=1,
        prefetch=1,
        update_by_bucket=True,
    )
    calls = [(bucket, Call(f"l.{bucket}", phase)) for phase in ("forward", "backward") for bucket in (0, 1)]
    calls[2:] = reversed(calls[2:])
    record: list[Event] = []
    for bucket, call in calls:
        record += [Entered(call, (bucket,)), Left(call)]
        record += [Ready(bucket)] if call.phase == "backward" else []
    schedule = compile_schedule((*record, Micro()), facts)
    bound = measure.state_bound(buckets, 0, stage=3, prefetch=1, depth=1)
    state = measure.state_scheduled(bound, schedule, buckets)
    # The second bucket's gradients settle before the first's are reduced, and are updated before those settle.
    assert (state.flats_peak, state.gradient_flats_peak) == (first + second, first)
    assert state.gradients == max(first, second) // 2 < bound.gradients
    assert measure.scheduled(schedule, buckets) == {
        "all_gather": Count(3, 2 * first + second),
        "reduce_scatter": Count(2, first + second),
    }
    assert bound.minus(state) == {"gradients": bound.gradients - state.gradients}


def test_bf16_shards_are_float32_masters_where_trained() -> None:
    specs = [spec("a", 256, dtype="bfloat16"), spec("f", 256, dtype="bfloat16", trained=False)]
    state = measure.state_bound(build_layout(specs, world=2, max_bytes=1 << 30), 0, stage=3, prefetch=1, depth=2)
    assert (state.shards, state.gradients) == (512 + 256, 512)
    assert state.gradient_flats_peak == 1024


def test_differences_name_what_is_off() -> None:
    state = measure.State(1, 3, 4, 5, 6)
    assert state.minus(state) == {}
    assert state.minus(measure.State(1, 4, 4, 5, 0)) == {"optimizer": -1, "gradient_flats_peak": 6}


def test_the_largest_relative_difference() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(4)}
    ours = {"a": torch.tensor([3.0, 4.5]), "b": torch.ones(4), "unused": None}
    assert measure.relative_difference(ours, reference) == pytest.approx(0.1)
    assert measure.relative_difference(ours | {"b": None}, reference) == math.inf


def test_equality_is_of_bits() -> None:
    nan, zero = torch.tensor([math.nan]), torch.zeros(1)
    assert measure.bit_equal([{"a": nan, "b": None}], [{"a": nan.clone(), "b": None}])
    assert not measure.bit_equal([{"a": zero}], [{"a": -zero}])
    assert not measure.bit_equal([{"a": zero}], [{"a": None}])
    assert not measure.bit_equal([{"a": zero}], [])
