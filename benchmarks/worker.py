"""One rank of one measurement: `python -m benchmarks.worker SPEC.json`, started by `benchmarks.launch`.

Reads a Spec, trains, and writes its Record as `rank<r>.json` beside the spec. Rank and addresses come from
the environment, as torchrun sets them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import host_profile, peers, trace
from benchmarks.models import SHAPES, batches

GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class Spec:
    """What to measure: `steps` steps, the first `warm` not counted. The others are timed `in_a_row` at a time.

    `trace` and `host_profile` name files to write; what the others mean is said by `peers.Options`.
    """

    impl: str
    model: str
    seq: int
    micro_batch: int
    steps: int
    warm: int
    lower: str = "inductor"
    compile_embedding: bool = False
    zeroweave: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    loop: str = "train_step"
    hf: str = ""
    gas: int = 1
    in_a_row: int = 1
    lora: int = 0
    group_size: int = 0
    trace: str | None = None
    host_profile: str | None = None

    def options(self) -> peers.Options:
        """How to build the implementation. The command line has checked the words."""
        names = ("lower", "compile_embedding", "zeroweave", "variants", "loop", "hf", "gas", "lora", "group_size")
        return peers.Options(**{name: getattr(self, name) for name in names})


@dataclass(slots=True)
class Record:
    """One rank's figures: seconds, GiB of this rank's GPU, one loss per step.

    The peaks are those of all steps but the first, captures of CUDA graphs and what is done once for them included.
    `steady_gib` is that of the steps behind the warm-up, and with it what replays write and no tensor has. That counts
    as used all the time, since replays allocate nothing. `reserved_gib` is what the allocator had in these.
    `peak_setup_gib` is that of the set-up and the first step, `device_gib` the most of the GPU that was in use after a
    step.
    """

    impl: str
    rank: int
    world: int
    device: str
    torch_version: str
    setup_s: float
    first_step_s: float
    step_s: list[float]
    host_s: float
    peak_gib: float
    steady_gib: float
    peak_reserved_gib: float
    reserved_gib: float
    peak_setup_gib: float
    device_gib: float
    losses: list[float]
    details: dict[str, Any]
    note: str | None = None
    profile: str | None = None


class Memory:
    """Peaks of the caching allocator, and the GPU's use, which also counts what bypasses the allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def take(self) -> tuple[float, float]:
        """The most that was allocated and that was reserved since the last call."""
        if not self.cuda:
            return 0.0, 0.0
        found = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return found[0] / GIB, found[1] / GIB

    def used(self) -> float:
        if not self.cuda:
            return 0.0
        free, total = torch.cuda.mem_get_info(self.device)
        return (total - free) / GIB


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    trainer: peers.Trainer, steps: Sequence[list[Tensor]], device: torch.device
) -> tuple[list[float], float, float]:
    """The losses of steps in a row; and of each, on average, the seconds of the device, and those of the host.

    The device is idle before and after them, and not in between.
    """
    synchronize(device)
    start = time.perf_counter()
    losses = [trainer.step(batches).detach().clone() for batches in steps]  # a captured step overwrites its loss
    host = time.perf_counter() - start
    synchronize(device)
    whole = time.perf_counter() - start
    return list(map(float, losses)), whole / len(steps), host / len(steps)


def steps_of(micro_batches: Iterator[Tensor], gas: int) -> Iterator[list[Tensor]]:
    while True:
        yield list(islice(micro_batches, gas))


def measure(spec: Spec, device: torch.device) -> Record:
    """Builds, trains and closes one implementation on this rank; collective over the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, memory = SHAPES[spec.model], Memory(device)
    data = steps_of(batches(shape, spec.micro_batch, spec.seq, rank, device), spec.gas)

    dist.barrier()
    start = time.perf_counter()
    trainer = peers.make(spec.impl, shape, device, spec.options())
    synchronize(device)
    setup = time.perf_counter() - start
    say(rank, f"{spec.impl}: set up in {setup:.1f} s{f'; {trainer.note}' if trainer.note else ''}")

    losses: list[float] = []
    seconds, host = [], []
    used, peaks = 0.0, []
    """what was allocated and reserved at most: up to the first step, in the warm-up, behind it"""
    while len(losses) < spec.steps:
        if (index := len(losses)) in (1, max(spec.warm, 1)):
            peaks.append(memory.take())
        count = 1 if index < spec.warm else spec.in_a_row
        found, whole, issued = timed(trainer, list(islice(data, count)), device)
        losses += found
        seconds.append(whole)
        host.append(issued)
        used = max(used, memory.used())
        if index in (0, spec.warm) or len(losses) == spec.steps:
            say(rank, f"{spec.impl}: step {len(losses)} took {whole:.3f} s (host {issued:.3f} s)")
    setup_peak, *later = [*peaks, memory.take()]
    record = Record(
        impl=spec.impl,
        rank=rank,
        world=world,
        device=torch.cuda.get_device_name(device) if memory.cuda else "cpu",
        torch_version=torch.__version__,
        setup_s=setup,
        first_step_s=seconds[0],
        step_s=seconds[spec.warm :],
        host_s=statistics.median(host[spec.warm :]),
        peak_gib=max(allocated for allocated, _ in later),
        steady_gib=later[-1][0] + trainer.held() / GIB,
        peak_reserved_gib=max(reserved for _, reserved in later),
        reserved_gib=later[-1][1],
        peak_setup_gib=setup_peak[0],
        device_gib=used,
        losses=losses,
        details=trainer.details(),
        note=trainer.note,
    )
    if spec.trace is not None:
        record.profile = traced(spec, trainer, data, rank)
    if spec.host_profile is not None:
        profiled(spec.host_profile, trainer, next(data), device, rank)
    trainer.close()
    return record


def profiled(path: str, trainer: peers.Trainer, batches: list[Tensor], device: torch.device, rank: int) -> None:
    """Every rank trains one more step; rank 0 writes where its host's time went."""
    if rank != 0:
        trainer.step(batches)
    else:
        Path(path).write_text(host_profile.profile(lambda: trainer.step(batches), device))
    synchronize(device)


def traced(spec: Spec, trainer: peers.Trainer, data: Iterator[list[Tensor]], rank: int) -> str | None:
    """Every rank trains two more steps; rank 0 profiles them and returns what the second one looked like."""
    assert spec.trace is not None
    path = Path(spec.trace)
    began = time.perf_counter()
    host = 0.0

    def step() -> None:
        nonlocal host
        begin = time.perf_counter()
        trainer.step(next(data))
        host = (time.perf_counter() - begin) * 1e3

    if rank != 0:
        for _ in range(2):
            step()
        return None
    trace.capture(step, path)
    profile = trace.analyse(trace.read(trace.gpu_events(path)), host)
    say(rank, f"{spec.impl}: traced in {time.perf_counter() - began:.1f} s")
    return profile.text() if profile is not None else "no work on a GPU in the trace"


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def main() -> None:
    path = Path(sys.argv[1])
    spec = Spec(**json.loads(path.read_text()))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        record = measure(spec, device)
        written = path.parent / f"rank{dist.get_rank()}.partial"
        written.write_text(json.dumps(asdict(record)))
        written.rename(written.with_suffix(".json"))  # the parent never reads half a record
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
