"""What the ranks do in the GPU tests of gathers by copy engine."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from benchmarks import trace
from tests.gpu.communication_jobs import kind_of, tally
from tests.gpu.graph_jobs import Case, batch_of, started
from tests.gpu.jobs import SMALL, WIDE, adamw, config, deterministic, join, start, step, tokens
from tests.gpu.schedule_jobs import Net, equal, rows
from tests.support.parity import digest
from zeroweave.comm.copy_engine import Choice, CopyEngines, refused
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import make_transport
from zeroweave.comm.registered_buffers import RegisteredBuffers
from zeroweave.comm.wrappers import Around
from zeroweave.layout import BucketLayout, Slot
from zeroweave.ranks.control import Control
from zeroweave.runtime.flat import ShardedFlat

WAYS = ("kernel", "copy_engine")
DELAY = 0.02
"""Seconds, at most, by which a rank is late now and then."""


class Late(Around):
    """A transport whose host is late now and then, each rank at other times."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._draw = random.Random(dist.get_rank())

    def _delay(self) -> None:
        if self._draw.random() < 0.1:
            time.sleep(DELAY * self._draw.random())

    def all_gather(self, *arguments: Any) -> Any:
        self._delay()
        return self._inner.all_gather(*arguments)

    def reduce_scatter(self, *arguments: Any) -> Any:
        self._delay()
        return self._inner.reduce_scatter(*arguments)


def by(way: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "transport": {"gathers": way}}


def state(engine: Any) -> str:
    """A hash of the parameters, the same on all ranks."""
    with engine.full_parameters() as full:
        return digest([{name: value.to("cpu", copy=True) for name, value in full.items()}])


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    parameters: str
    symmetric: int
    gathers: str
    departures: int


def trained(way: str, stage: int, mode: str, steps: int, accumulated: int = 1) -> Trained:
    """Steps of ranks that are late now and then."""
    device = join()
    settings = {**config(stage, mode, torch.bfloat16), "gradient_accumulation_steps": accumulated}
    settings["compile"]["cuda_graphs"] = False  # for which kernels gather into buffers, too
    with deterministic(), start(SMALL, by(way, settings), torch.bfloat16) as engine:
        engine._context.transport.wrap(Late)
        losses = [step(engine, tokens(SMALL, device, index)) for index in range(steps * accumulated)]
        stats = engine.stats
        return Trained(losses, state(engine), stats.memory.symmetric, stats.gathers, stats.departures)


def both(stage: int, mode: str, steps: int = 30, accumulated: int = 1) -> list[Trained]:
    return [trained(way, stage, mode, steps, accumulated) for way in WAYS]


def cached(way: str) -> tuple[int, int, int]:
    """Bytes that PyTorch's allocator had more behind a step, once there is a schedule; of buffers, and of all flats."""
    device = join()
    torch.cuda.empty_cache()
    before, found = torch.cuda.memory_reserved(), []
    with start(WIDE, by(way, config(2, "aot_eager", torch.bfloat16)), torch.bfloat16) as engine:
        for index in range(4):
            step(engine, tokens(WIDE, device, index))
            found.append(torch.cuda.memory_reserved() - before)
        return max(found[1:]), engine.stats.memory.symmetric, sum(layout.nbytes for layout in engine.buckets)


def both_cached() -> list[tuple[int, int, int]]:
    return [cached(way) for way in WAYS]


# ---------------------------------------------------------------------- what departs, and what stays in use
class Keeping(nn.Module):
    """Keeps a view of its weight from each forward, on one rank, until the next one."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(512, 512), keeps
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.kept = self.linear.weight.t()
        return x + torch.tanh(self.linear(x))


class Straying(Net):
    """Blocks in another order where told to, among them some that keep views."""

    def __init__(self) -> None:
        super().__init__()
        keeps = dist.get_rank() == 0
        self.blocks = nn.ModuleList([*self.blocks, *(Keeping(keeps) for _ in range(3))])
        self.order = list(range(len(self.blocks)))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.third(self.second(self.first(x)))


def strayed(way: str, stage: int, prefetch: int) -> tuple[list[float], str, int, bool]:
    """Losses, parameters, departures, and whether the views that were kept have shown the parameters' values."""
    device, draw = join(), random.Random(5)
    torch.manual_seed(0)
    model = Straying().to(device)
    compiling = {"enabled": False, "prefetch": prefetch, "memory_budget": "none"}
    settings = {"stage": stage, "compile": compiling, "deadline_seconds": 60.0}
    right, losses = True, []
    with deterministic(), zw.initialize(model, adamw(model.parameters()), by(way, settings)) as engine:
        for index in range(24):
            model.order = list(range(len(model.blocks)))
            if index % 5 == 4:
                draw.shuffle(model.order)
            for micro in range(2 if index % 7 == 6 else 1):
                engine.set_gradient_accumulation_boundary(index % 7 != 6 or micro == 1)
                loss = engine(rows(engine.rank, 2 * index + micro, device)).pow(2).mean()
                engine.backward(loss)
                losses.append(loss.item())
                engine.step()
            if index % 3 == 2:
                with torch.no_grad():
                    losses.append(float(engine(rows(engine.rank, 100 + index, device)).pow(2).mean()))
            if index % 6 == 5:
                for number, block in enumerate(model.blocks):
                    if isinstance(block, Keeping):
                        value = engine.full(f"blocks.{number}.linear.weight")
                        assert value is not None
                        right &= block.kept is None or torch.equal(block.kept, value.t())
            if index == 15:
                engine.reschedule(prefetch=2)
        return losses, state(engine), engine.stats.departures, right


def both_strayed(stage: int, prefetch: int) -> list[tuple[list[float], str, int, bool]]:
    return [strayed(way, stage, prefetch) for way in WAYS]


# ---------------------------------------------------------------------- schedules
def net(device: torch.device, way: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to(device)
    compiling = {"lower": "aot_eager", "record_steps": 0, "cuda_graphs": False, **settings}
    made = {"stage": 3, "bucket": {"bytes": 4096}, "compile": compiling, "deadline_seconds": 60.0}
    return zw.initialize(model, adamw(model.parameters()), by(way, made))


def stepped(engine: Any, index: int) -> dict[str, Tensor]:
    engine.backward(engine(rows(engine.rank, index, engine.device)).pow(2).mean())
    gradients = engine.gradients()
    engine.step()
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def schedules(changes: list[dict[str, Any]], least: int) -> list[tuple[bool, bool, int, int, int, int]]:
    """For each change: are gradients those of kernels, was the schedule followed; buckets with a buffer and
    without; buffers, and their bytes. Copy engines gather buckets of `least` bytes and more.
    """
    device, found, index = join(), [], 0
    decided = patch("zeroweave.engine.transports.choose", lambda *arguments: Choice("a test wants it", least))
    plain = {"prefetch": 0, "keep": "none"}
    with deterministic(), net(device, "kernel", **plain) as ordinary, decided, net(device, "auto", **plain) as engine:
        for change in changes:
            engine.reschedule(**change)
            same = []
            for _ in range(3):
                same.append(equal(stepped(ordinary, index), stepped(engine, index)))
                index += 1
            followed = engine.executed == engine.schedule.instructions
            buffers = len(engine.schedule.registered_buffers)
            memory = len(engine.schedule.registered_sizes), engine.stats.memory.symmetric
            found.append((all(same), followed, buffers, len(engine.buckets) - buffers, *memory))
    return found


# ---------------------------------------------------------------------- what runs
def kernels(stage: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Of one step: NCCL's kernels in the profiler's trace, collectives of the schedule, and of the ledger."""
    device = join()
    with start(SMALL, by("copy_engine", config(stage, "inductor", torch.bfloat16)), torch.bfloat16) as engine:
        for index in range(3):
            step(engine, tokens(SMALL, device, index))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.capture(lambda: step(engine, tokens(SMALL, device)), path)
            names = [kind for event in trace.gpu_events(path) if (kind := kind_of(event["name"])) is not None]
        issued = {kind: traffic.calls for kind, traffic in engine.stats.last_step.items() if traffic.calls}
        return tally(names), tally([kind for kind, _ in engine.schedule.collectives()]), issued


def automatic() -> tuple[str, int | None, float, list[float]]:
    """What is chosen for WIDE, the seconds of `initialize`, and some losses."""
    device = join()
    begin = time.perf_counter()
    with start(WIDE, config(3, "eager", torch.bfloat16), torch.bfloat16) as engine:
        seconds = time.perf_counter() - begin
        choice = engine._context.gathers
        losses = [step(engine, tokens(WIDE, device, index)) for index in range(3)]
        return str(choice), choice.least, seconds, losses


# ---------------------------------------------------------------------- captured
def between(graphs: bool, stage: int, accumulated: int) -> tuple[list[float], str, int]:
    """Losses, parameters, and calls launched as graphs, with evaluation between each forward and its backward."""
    case = Case(stage, accumulated, more={"transport": {"gathers": "copy_engine"}})
    losses = []
    with started(case, graphs) as engine:
        for index in range(40 * accumulated):
            loss = engine(*batch_of(case, index, 1.0, engine.device))
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(*batch_of(case, index + 1, 1.0, engine.device))))
            engine.train()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        return losses, state(engine), engine.stats.graphed_calls


def both_between(stage: int, accumulated: int) -> tuple[bool, int]:
    """Is all the same with graphs and without? And how many calls were launched as graphs."""
    (*plain, _), (*graphed, replayed) = (between(graphs, stage, accumulated) for graphs in (False, True))
    return plain == graphed, replayed


@contextmanager
def copying(device: torch.device, ledger: Ledger) -> Iterator[tuple[Any, Any, RegisteredBuffers]]:
    """Transports by kernel and by copy engine, and the buffers of the latter."""
    control = Control.over(None)
    assert not refused("copy_engine", control, device, 1 << 30)
    engines = CopyEngines(control, device)
    own = engines.join(timedelta(seconds=60))
    plain, buffers = make_transport(dist.group.WORLD, device, ledger), RegisteredBuffers(engines.make)
    yield plain, engines.around(plain, own, ledger), buffers
    buffers.close()
    engines.close()
    control.close()


def layout(number: int, numel: int) -> BucketLayout:
    world = dist.get_world_size()
    slot = Slot("w", 0, numel, (numel,))
    return BucketLayout(number, f"b{number}", "bfloat16", 2, True, "world", world, (slot,), numel)


def captured(megabytes: int = 8) -> tuple[bool, bool, bool]:
    """Are the results right outside of a capture, replayed, and after a view was kept between replays?"""
    device = join()
    ledger = Ledger(dist.get_world_size(), dist.get_rank())
    with copying(device, ledger) as (plain, transport, buffers):
        (buffer,) = buffers.fit({0: megabytes << 20}).values()
        shapes = [layout(0, megabytes << 19), layout(1, megabytes << 18)]
        shards = [torch.empty(each.shard_numel, dtype=torch.bfloat16, device=device) for each in shapes]
        gauge = ledger.gauge("flats")
        flats = [ShardedFlat(*pair, transport, gauge) for pair in zip(shapes, shards, strict=True)]
        expected = [ShardedFlat(*pair, plain, gauge) for pair in zip(shapes, shards, strict=True)]
        results = [torch.empty(each.numel, dtype=torch.bfloat16, device=device) for each in shapes]
        for flat in flats:
            flat.assign(buffer)

        def renew(seed: int) -> None:
            torch.manual_seed(seed + dist.get_rank())
            for shard in shards:
                shard.normal_()

        def work() -> None:
            for flat, result in zip(flats, results, strict=True):  # they take turns in one buffer
                flat.unshard()
                flat.wait()
                torch.mul(flat.flat, 2, out=result)
                assert flat.reshard()

        def right() -> bool:
            torch.cuda.synchronize()
            found = True
            for flat, result in zip(expected, results, strict=True):
                flat.unshard()
                flat.wait()
                found &= torch.equal(result, 2 * flat.flat)
                flat.reshard()
            return found

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            renew(1)
            for _ in range(3):
                work()
        eager = right()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            work()
        replayed, kept = [], []
        for seed in range(2, 6):
            renew(seed)
            torch.cuda.synchronize()
            graph.replay()
            replayed.append(right())
            flats[0].unshard()  # without the graph, and kept until before the next replay
            flats[0].wait()
            view, before = flats[0].flat[:64], flats[0].flat[:64].clone()
            flats[0].reshard()
            buffer.vacate()
            graph.replay()
            kept.append(right() and torch.equal(view, before))
            del view
            flats[0].free()
        del graph
        torch.cuda.synchronize()
        return eager, all(replayed), all(kept)
