"""What the ranks do in the GPU tests. Jobs are collective: all ranks call the same with equal arguments."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from benchmarks.models import Shape, build
from tests.support.reference import Gradients, worst

SMALL = Shape(hidden=256, intermediate=704, layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=512)
WIDE = Shape(hidden=1024, intermediate=4096, layers=8, heads=16, kv_heads=16, head_dim=64, vocabulary=1024)
STEPS = 10
LEARNING_RATE = 5e-4


def join() -> torch.device:
    """This rank's device; the first job on a GPU machine replaces the workers' gloo group by NCCL.

    Ranks that share a GPU are each on a host of their own for NCCL, which refuses them otherwise.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    if dist.get_backend() != "nccl":
        # cuBLAS reads this when it is first used, and needs it to be deterministic.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["LOCAL_RANK"] = str(device.index)
        if torch.cuda.device_count() < world:
            os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(device)
        port = [free_port() if rank == 0 else None]
        dist.broadcast_object_list(port)
        dist.destroy_process_group()
        address = f"tcp://127.0.0.1:{port[0]}"
        dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world, device_id=device)
    return device


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose sums have one order; new tensors are filled with NaN, so that none is read unwritten."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tokens(shape: Shape, device: torch.device, index: int = 0, sequences: int = 4, length: int = 128) -> Tensor:
    """This rank's batch `index`, int64 [sequences, length]: counting, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * index + dist.get_rank())
    start = torch.randint(0, shape.vocabulary, (sequences, 1), generator=generator)
    stride = torch.randint(1, 8, (sequences, 1), generator=generator)
    return ((start + stride * torch.arange(length)) % shape.vocabulary).to(device)


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)


def config(stage: int, mode: str, dtype: torch.dtype, prefetch: int = 1, depth: int = 2) -> dict[str, Any]:
    """`mode`: "inductor", "aot_eager" or "eager"."""
    lowering: dict[str, Any] = {"enabled": False} if mode == "eager" else {"lower": mode}
    return {
        "stage": stage,
        "precision": {"params": str(dtype).removeprefix("torch.")},
        "compile": {**lowering, "prefetch": prefetch, "memory_budget": "none"},
        "reduce": {"depth": depth},
        "deadline_seconds": 60.0,
    }


# The reference


def average(parameters: list[nn.Parameter]) -> None:
    """Mean over ranks of every gradient, in its dtype; dividing by two first is exact."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad)


def reference(shape: Shape, dtype: torch.dtype, steps: int = STEPS, reduce: bool = True) -> list[float]:
    """Losses of the unsharded model in eager mode: parameters in `dtype`, fp32 masters under AdamW.

    `reduce=False` leaves the ranks' gradients apart, as a wrong implementation might.
    """
    device = join()
    model = build(shape, device, dtype)
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float().clone()) for p in parameters]
    optimizer = adamw(masters)
    losses = []
    for _ in range(steps):
        batch = tokens(shape, device)
        loss = model(batch, batch)
        loss.backward()
        losses.append(loss.item())
        if reduce:
            average(parameters)
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return losses


# The engine


@dataclass(frozen=True)
class Route:
    """Which path a run took, after `steps` steps."""

    compiled_calls: int
    eager_calls: int
    on_demand: int
    departures: int
    eager_regions: dict[str, str]
    replayed: bool


@dataclass(frozen=True)
class Run:
    losses: list[float]
    path: Route


def step(engine: Any, batch: Tensor) -> float:
    loss = engine(batch, batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def start(shape: Shape, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    model = build(shape, join(), dtype)
    return zw.initialize(model, adamw(model.parameters()), settings)


def train(shape: Shape, settings: dict[str, Any], dtype: torch.dtype, steps: int = STEPS) -> Run:
    """Losses under the engine, and its path, of which the last figures count once there is a schedule."""
    device = join()
    losses = []
    with start(shape, settings, dtype) as engine:
        adopted = None
        for _ in range(steps):
            if adopted is None and engine.schedule is not None:
                adopted = engine.stats
            losses.append(step(engine, tokens(shape, device)))
        stats = engine.stats
        path = Route(
            compiled_calls=stats.compiled_calls,
            eager_calls=stats.eager_calls,
            on_demand=stats.on_demand_unshards - (adopted.on_demand_unshards if adopted else 0),
            departures=stats.departures - (adopted.departures if adopted else 0),
            eager_regions=dict(stats.eager_regions),
            replayed=engine.schedule is not None and tuple(engine.executed) == engine.schedule.instructions,
        )
    return Run(losses, path)


def losses(stage: int, mode: str, prefetch: int = 1, depth: int = 2) -> tuple[Run, list[float]]:
    """bfloat16 with fp32 masters: the engine's run and the reference's losses on this rank."""
    settings = config(stage, mode, torch.bfloat16, prefetch, depth)
    return train(SMALL, settings, torch.bfloat16), reference(SMALL, torch.bfloat16)


def unreduced() -> tuple[list[float], list[float]]:
    """The reference's losses, and those of ranks that never reduce a gradient."""
    return reference(SMALL, torch.bfloat16), reference(SMALL, torch.bfloat16, reduce=False)


def stages_bitwise(mode: str) -> dict[int, list[float]]:
    """Losses of each stage with deterministic kernels."""
    with deterministic():
        return {
            stage: train(SMALL, config(stage, mode, torch.bfloat16), torch.bfloat16, 6).losses for stage in (1, 2, 3)
        }


def gradients(stage: int, mode: str, checked: int = 3) -> list[tuple[float, str]]:
    """fp32: the worst bounded relative difference from the reference's gradients in each of the first steps.

    Nothing is updated, so that recording, adopting and replaying the schedule are compared at equal weights.
    """
    device = join()
    model = build(SMALL, device, torch.float32)
    expected = []
    for index in range(checked):
        batch = tokens(SMALL, device, index)
        model(batch, batch).backward()
        average(list(model.parameters()))
        found: Gradients = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad.cpu(), None
        expected.append(found)
    differences = []
    with start(SMALL, config(stage, mode, torch.float32), torch.float32) as engine:
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        for index in range(checked):
            batch = tokens(SMALL, device, index)
            engine.backward(engine(batch, batch))
            differences.append(worst(engine.gradients(), expected[index]))
            engine.step()
        assert (engine.stats.compiled_calls > 0) == (mode != "eager")
    return differences


# Memory


@dataclass(frozen=True)
class Peak:
    """Bytes of this rank's GPU. `rest`: allocated between steps. `grown`: more so after further steps.

    `states`: what the engine says its shards, masters and optimizer take; `gradients`: gradient shards. `small`: the
    largest bucket of less than an eighth of the largest one.
    """

    rest: int
    grown: int
    peak: int
    states: int
    gradients: int
    flats: int
    gradient_flats: int
    largest: int
    small: int
    total: int
    activations: int


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def activations(shape: Shape) -> int:
    """What a forward and backward of the whole model needs beyond parameters and their gradients."""
    device = join()
    model = build(shape, device, torch.bfloat16)
    batch = tokens(shape, device)
    model(batch, batch).backward()  # gradients and the libraries' workspaces exist from here on
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    model(batch, batch).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak(stage: int) -> Peak:
    device = join()
    needed = activations(WIDE)
    before = allocated()
    settings = config(stage, "inductor", torch.bfloat16)
    settings["compile"]["cuda_graphs"] = False
    with start(WIDE, settings, torch.bfloat16) as engine:
        for _ in range(4):
            step(engine, tokens(WIDE, device))
        rest = allocated()
        torch.cuda.reset_peak_memory_stats()
        engine._context.runtime.restart_peaks()  # what they are measured beside
        for _ in range(3):
            step(engine, tokens(WIDE, device))
        torch.cuda.synchronize()
        highest = torch.cuda.max_memory_allocated()
        memory = engine.stats.memory
        sizes = [layout.nbytes for layout in engine.buckets]
        return Peak(
            rest=rest - before,
            grown=allocated() - rest,
            peak=highest - before,
            states=memory.shards + memory.masters + memory.optimizer,
            gradients=memory.gradients,
            flats=memory.flats_peak,
            gradient_flats=memory.gradient_flats_peak,
            largest=max(sizes),
            small=max(size for size in sizes if size < max(sizes) / 8),
            total=sum(sizes),
            activations=needed,
        )


def again() -> tuple[list[int], list[list[float]]]:
    """Three engines of one model class, one after the other: bytes left after each, and their losses."""
    before = allocated()
    left, found = [], []
    with deterministic():
        for stage in (3, 2, 3):
            found.append(train(WIDE, config(stage, "inductor", torch.bfloat16), torch.bfloat16, 4).losses)
            left.append(allocated() - before)
    return left, found


def both() -> tuple[list[float], list[float], list[float]]:
    """Two engines alive at once, trained in turns, and the losses of one that is alone."""
    device = join()
    settings = [config(3, "inductor", torch.bfloat16), config(2, "inductor", torch.bfloat16)]
    found: tuple[list[float], list[float]] = ([], [])
    with deterministic():
        with (
            start(SMALL, settings[0], torch.bfloat16) as one,
            start(SMALL, settings[1], torch.bfloat16) as two,
        ):
            for _ in range(5):
                for engine, mine in zip((one, two), found, strict=True):
                    mine.append(step(engine, tokens(SMALL, device)))
        return *found, train(SMALL, settings[0], torch.bfloat16, 5).losses
