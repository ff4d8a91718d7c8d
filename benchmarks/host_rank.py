"""One process of `benchmarks.host`: `python -m benchmarks.host_rank SPEC.json`, started by `launch`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Spec:
    """What to measure.

    `packages`: one for each kind, the folder that zeroweave is imported from; "": `torch.compile` alone. Each kind has
    `world` processes. The kinds take turns, `turns` times, each time with `steps` steps.
    """

    packages: tuple[str, ...]
    world: int
    stage: int
    blocks: int
    width: int
    warm: int
    steps: int
    turns: int
    lower: str


@dataclass(frozen=True)
class Record:
    """Microseconds of one block's forward call and of its backward, medians over the steps.

    `…_us` are those of the processor in the thread that trains, `…_wall_us` those of the clock.
    """

    forward_us: float
    backward_us: float
    forward_wall_us: float
    backward_wall_us: float


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Stack(nn.Module):
    """Blocks one behind the other; the sum of what comes out is the loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(spec.width) for _ in range(spec.blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Plain:
    """The methods of an engine for a model whose blocks are compiled, and nothing else."""

    def __init__(self, model: Stack, optimizer: torch.optim.Optimizer, lower: str) -> None:
        self._model, self._optimizer = model, optimizer
        for layer in model.layers:
            layer.compile(backend=lower)

    def __call__(self, x: Tensor) -> Tensor:
        loss: Tensor = self._model(x)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def start(spec: Spec, package: str, group: dist.ProcessGroup) -> Any:
    """The engine, whose steps follow a schedule that no measured time changes, or what stands in for one."""
    torch.manual_seed(0)
    model = Stack(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if not package:
        return Plain(model, optimizer, spec.lower)
    sys.path.insert(0, package)
    import zeroweave

    if (found := Path(zeroweave.__file__).resolve().parent.parent) != Path(package).resolve():
        raise SystemExit(f"zeroweave was imported from {found}, not from {package}")
    compiling = {"lower": spec.lower, "prefetch": 1, "record_steps": 0}
    config = {"stage": spec.stage, "compile": compiling}
    return zeroweave.initialize(model, optimizer, config, process_group=group)


def seconds(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a function returns, the processor's time in this thread, and that of the clock."""
    wall, own = time.perf_counter(), time.thread_time()
    result = run()
    return result, time.thread_time() - own, time.perf_counter() - wall


def train(engine: Any, x: Tensor, group: dist.ProcessGroup, steps: int) -> list[tuple[float, ...]]:
    """The seconds of steps, as in `Record`."""
    times: list[tuple[float, ...]] = []
    for _ in range(steps):
        dist.barrier(group)
        loss, forward, forward_wall = seconds(lambda: engine(x))
        dist.barrier(group)
        _, backward, backward_wall = seconds(partial(engine.backward, loss))
        engine.step()
        times.append((forward, backward, forward_wall, backward_wall))
    return times


def measure(spec: Spec) -> Record:
    """This process's figures; collective over the default group, which has the processes of all kinds."""
    groups = [dist.new_group(list(range(k * spec.world, (k + 1) * spec.world))) for k in range(len(spec.packages))]
    mine = dist.get_rank() // spec.world
    engine, x = start(spec, spec.packages[mine], groups[mine]), torch.ones(1, spec.width)
    train(engine, x, groups[mine], spec.warm)
    times = []
    dist.barrier()
    for turn in range(spec.turns * len(spec.packages)):
        if turn % len(spec.packages) == mine:
            times += train(engine, x, groups[mine], spec.steps)
        dist.barrier()
    if spec.packages[mine]:
        stats = engine.stats
        if stats.departures or stats.eager_regions:
            raise SystemExit(f"steps departed from the schedule or ran eagerly: {stats}")
        engine.destroy()
    return Record(*(statistics.median(each) / spec.blocks * 1e6 for each in zip(*times, strict=True)))


def main() -> None:
    path = Path(sys.argv[1])
    spec = Spec(**json.loads(path.read_text()))
    dist.init_process_group("gloo")
    try:
        record = measure(spec)
        (path.parent / f"rank{dist.get_rank()}.json").write_text(json.dumps(asdict(record)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
