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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers, trace
from benchmarks.models import SHAPES, batches

GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class Spec:
    """What to measure: `steps` steps, the first `warm` not counted; `trace` names the file to write."""

    impl: str
    model: str
    seq: int
    micro_batch: int
    steps: int
    warm: int
    lower: str = "inductor"
    compile_embedding: bool = False
    zeroweave: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None


@dataclass(slots=True)
class Record:
    """One rank's figures: seconds, GiB of this rank's GPU, one loss per step."""

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
    peak_reserved_gib: float
    peak_setup_gib: float
    device_gib: float
    losses: list[float]
    details: dict[str, Any]
    profile: str | None = None


class Memory:
    """Peaks of the caching allocator, and the GPU's use, which also counts what bypasses the allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def allocated(self) -> float:
        return torch.cuda.max_memory_allocated(self.device) / GIB if self.cuda else 0.0

    def reserved(self) -> float:
        return torch.cuda.max_memory_reserved(self.device) / GIB if self.cuda else 0.0

    def used(self) -> float:
        if not self.cuda:
            return 0.0
        free, total = torch.cuda.mem_get_info(self.device)
        return (total - free) / GIB


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(trainer: peers.Trainer, tokens: Tensor, device: torch.device) -> tuple[Tensor, float, float]:
    """One step's loss, its seconds until the device is idle, and the seconds until the host was free."""
    synchronize(device)
    start = time.perf_counter()
    loss = trainer.step(tokens)
    host = time.perf_counter() - start
    synchronize(device)
    return loss, time.perf_counter() - start, host


def measure(spec: Spec, device: torch.device) -> Record:
    """Builds, trains and closes one implementation on this rank; collective over the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, memory = SHAPES[spec.model], Memory(device)
    options = peers.Options(spec.lower, spec.compile_embedding, spec.zeroweave)  # type: ignore[arg-type]
    data: Iterator[Tensor] = batches(shape, spec.micro_batch, spec.seq, rank, device)

    dist.barrier()
    start = time.perf_counter()
    trainer = peers.make(spec.impl, shape, device, options)
    synchronize(device)
    setup = time.perf_counter() - start
    say(rank, f"{spec.impl}: set up in {setup:.1f} s")

    losses, seconds, host = [], [], []
    peak_setup = 0.0
    for index in range(spec.steps):
        if index == spec.warm:
            peak_setup = memory.allocated()
            memory.reset()
        loss, whole, issued = timed(trainer, next(data), device)
        losses.append(loss)
        seconds.append(whole)
        host.append(issued)
        if index in (0, spec.warm, spec.steps - 1):
            say(rank, f"{spec.impl}: step {index + 1} took {whole:.3f} s (host {issued:.3f} s)")
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
        peak_gib=memory.allocated(),
        peak_reserved_gib=memory.reserved(),
        peak_setup_gib=max(peak_setup, memory.allocated()),
        device_gib=memory.used(),
        losses=[float(loss) for loss in losses],
        details=trainer.details(),
    )
    if spec.trace is not None:
        record.profile = traced(spec, trainer, data, rank)
    trainer.close()
    return record


def traced(spec: Spec, trainer: peers.Trainer, data: Iterator[Tensor], rank: int) -> str | None:
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
