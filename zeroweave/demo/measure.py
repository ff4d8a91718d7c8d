"""Figures that do not come from the engine: what its own are compared with.

Collectives are counted by PyTorch's profiler, state sizes follow from the layout alone, and gradients come
from DistributedDataParallel.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from zeroweave.layout import BucketLayout
from zeroweave.schedule import Reduce, Reshard, Schedule, Settle, Unshard, Update, slight

TIMED_STEPS = 5

# The host-side agreement uses c10d::allgather_, a collective of another name: it is not counted here.
PROFILED = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
}


@dataclass(frozen=True)
class Count:
    """Collectives of one kind: how many, and the bytes of the full flats they gathered or reduced."""

    calls: int = 0
    payload: int = 0


def total(issued: Iterable[tuple[str, int]]) -> dict[str, Count]:
    """Of collectives, each with its kind and its payload: their counts by kind, in the order of PROFILED."""
    payloads: dict[str, list[int]] = {kind: [] for kind in PROFILED.values()}
    for kind, payload in issued:
        payloads[kind].append(payload)
    return {kind: Count(len(each), sum(each)) for kind, each in payloads.items() if each}


def scheduled(schedule: Schedule, buckets: Sequence[BucketLayout]) -> dict[str, Count]:
    """What the schedule of one step says will be issued."""
    nbytes = {bucket.id: bucket.nbytes for bucket in buckets}
    return total((kind, nbytes[bucket]) for kind, bucket in schedule.collectives())


def step_seconds(step: Callable[[int], object], device: torch.device) -> tuple[float, int]:
    """The median time of `TIMED_STEPS` steps after one that is not timed, in seconds, and how many steps it ran.

    `step(k)` is called with k = 0, 1, … A step is over when the device has done its work.
    """
    times = []
    for k in range(1 + TIMED_STEPS):
        begin = time.perf_counter()
        step(k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]), len(times)


def profiled(step: Callable[[], object]) -> dict[str, Count]:
    """Runs `step` once and counts the collectives that PyTorch's profiler saw on this process.

    What is gathered and reduced is float32. Of collectives in one launch each counts.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        step()
    with TemporaryDirectory() as folder:  # events in memory do not have the shapes of lists before PyTorch 2.13
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    found: list[tuple[str, int]] = []
    for kind, event in ((PROFILED[event["name"]], event) for event in events if event.get("name") in PROFILED):
        # Flats and shards: each is one shape, or the shapes of a list.
        sides = [side if isinstance(side[0], list) else [side] for side in event["args"]["Input Dims"] if side]
        found += ((kind, 4 * max(map(math.prod, shapes))) for shapes in zip(*sides, strict=True))
    return total(found)


@dataclass(frozen=True)
class State:
    """Bytes of model state on one rank, by kind. Shards are the masters: float32 where trained."""

    shards: int
    optimizer: int
    gradients: int
    flats_peak: int
    gradient_flats_peak: int

    def minus(self, other: object) -> dict[str, int]:
        """The differences from `other`, an object with the same attributes, where there is one."""
        deltas = {name: value - int(getattr(other, name)) for name, value in asdict(self).items()}
        return {name: delta for name, delta in deltas.items() if delta}


def state_bound(buckets: Sequence[BucketLayout], rank: int, stage: int, prefetch: int, depth: int) -> State:
    """What training with Adam may keep on `rank`, from the layout alone; gradients in float32.

    Shards, flats and gradients include padding. Adam has two float32 values for each element of a fragment
    and one float32 step count for each fragment that is not empty. Flats: all of them for stages 1 and 2; for
    stage 3 the largest 1 + prefetch. Gradient flats: the largest `depth`, in flight at once, and the slight ones beside
    them, see `schedule.slight`.
    """
    trained = [bucket for bucket in buckets if bucket.trainable]
    fragments = [bucket.fragment(i, bucket.place(rank)).numel for bucket in trained for i in range(len(bucket.slots))]
    flats = sorted((bucket.nbytes for bucket in buckets), reverse=True)
    beside = slight({bucket.id: bucket.nbytes for bucket in trained})
    gradient_flats = sorted((4 * bucket.numel for bucket in trained if bucket.id not in beside), reverse=True)
    return State(
        shards=sum(
            bucket.shard_numel * (max(bucket.itemsize, 4) if bucket.trainable else bucket.itemsize)
            for bucket in buckets
        ),
        optimizer=sum(8 * numel + 4 for numel in fragments if numel),
        gradients=sum(4 * bucket.shard_numel for bucket in trained),
        flats_peak=sum(flats if stage < 3 else flats[: 1 + prefetch]),
        gradient_flats_peak=sum(gradient_flats[:depth])
        + sum(4 * bucket.numel for bucket in trained if bucket.id in beside),
    )


def state_scheduled(bound: State, schedule: Schedule, buckets: Sequence[BucketLayout]) -> State:
    """`bound` with the peaks that this schedule really reaches in a step of one backward.

    A flat lives while a hold on it lasts, a gradient flat from its reduction to its settling, a gradient
    shard from there to its bucket's update.
    """
    by_id = {bucket.id: bucket for bucket in buckets}
    holds: dict[int, int] = {}
    flying: set[int] = set()
    settled: set[int] = set()
    flats, gradient_flats, gradients = [0], [0], [0]
    for instruction in schedule.instructions:
        match instruction:
            case Unshard(b) | Reshard(b):
                holds[b] = holds.get(b, 0) + (1 if isinstance(instruction, Unshard) else -1)
            case Reduce(b):
                flying.add(b)
            case Settle(b):
                flying.discard(b)
                settled.add(b)
            case Update(b):
                settled.discard(b)
        flats.append(sum(by_id[b].nbytes for b, held in holds.items() if held))
        gradient_flats.append(sum(4 * by_id[b].numel for b in flying))
        gradients.append(sum(4 * by_id[b].shard_numel for b in settled))
    return replace(bound, gradients=max(gradients), flats_peak=max(flats), gradient_flats_peak=max(gradient_flats))


def ddp_gradients(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of `model(**batch).loss`, averaged over the ranks by DistributedDataParallel, on the CPU.

    Uses the default process group; `model` must be the same on all ranks, and lies on this rank's device. Its
    `.grad`s are dropped again.
    """
    wrapped = DistributedDataParallel(model)
    wrapped(**batch).loss.backward()
    gradients = {
        name: p.grad.detach().float().cpu().clone() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients


def relative_difference(ours: Mapping[str, Tensor | None], reference: Mapping[str, Tensor]) -> float:
    """The largest of ‖ours − reference‖ / ‖reference‖ over the parameters; infinite where one side has no
    gradient.
    """
    found = {name: gradient for name, gradient in ours.items() if gradient is not None}
    if found.keys() != reference.keys():
        return float("inf")
    return max(float((found[k] - each).norm() / each.norm().clamp_min(1e-30)) for k, each in reference.items())


def bit_equal(one: Sequence[Mapping[str, Tensor | None]], other: Sequence[Mapping[str, Tensor | None]]) -> bool:
    """Whether two runs' tensors (of each step, by name) are equal in every bit."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(same(a[name], b[name]) for name in a) for a, b in zip(one, other, strict=True)
    )


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Bitwise, so that a NaN equals itself and 0 does not equal -0."""
    if one is None or other is None:
        return one is other
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.numpy().tobytes() == other.numpy().tobytes()
