"""One rank of one engine of `benchmarks.coalesce`: `python -m benchmarks.windows SPEC.json`, started by `launch`.

The same model, data, optimizer and windows for zeroweave and DeepSpeed, whose engines have methods of the same names.
Every row is written when it is measured, so that a rank that is ended leaves what it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.zeroweave import merge

MIB = float(2**20)
ENGINES = ("zeroweave", "deepspeed", "plain")
"""`plain`: torch.compile alone, on each GPU for itself; what the same computation takes without ZeRO."""
MODES = ("baseline", "no_sync", "coalesce")


@dataclass(frozen=True)
class Spec:
    """One engine at one stage. `lower`: zeroweave's, or "none" for eager. `accumulate`: dtype of local sums.

    `graphs`: its windows are CUDA graphs; then each gathers the parameters itself, at every stage. `settings`: what
    else of zeroweave's config is other than here.
    """

    engine: str
    stage: int
    width: int
    layers: int
    rows: int
    backwards: tuple[int, ...]
    modes: tuple[str, ...]
    warm: int
    rounds: int
    lower: str
    blocks: bool
    accumulate: str
    graphs: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """One rank's figures of one kind of window. `missing`: why there are none.

    Milliseconds are medians. MiB are of this rank's GPU above what was allocated before the window, None without one.
    `pool`, `registered`: MiB in addition that graphs have, and registered buffers, at any time. In windows that are no
    graphs a buffer counts while a flat is in it.
    `collectives` (kind -> calls) and `wire` (MiB that this rank sends) are those of a window and its step.
    """

    engine: str
    stage: int
    mode: str
    n: int
    backwards_ms: float | None = None
    step_ms: float | None = None
    peak: float | None = None
    resident: float | None = None
    flushed: float | None = None
    collectives: dict[str, int] | None = None
    wire: float | None = None
    loss: float | None = None
    details: dict[str, Any] | None = None
    missing: str | None = None
    pool: float | None = None
    registered: float = 0.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class MLP(nn.Module):
    """Linear layers with a ReLU behind each, and the mean square of what comes out as the loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        layer: Callable[[], nn.Module] = (
            (lambda: Block(spec.width)) if spec.blocks else (lambda: nn.Linear(spec.width, spec.width, bias=False))
        )
        self.layers = nn.ModuleList(layer() for _ in range(spec.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def build(spec: Spec) -> nn.Module:
    torch.manual_seed(0)
    return MLP(spec)


class Plain:
    """The methods of an engine for a model that is not sharded: gradients add up in `.grad`, nothing is reduced."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        model = build(spec).to(device, torch.bfloat16)
        self._run = model if spec.lower == "none" else torch.compile(model, backend=spec.lower)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def __call__(self, x: Tensor) -> Tensor:
        loss: Tensor = self._run(x)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def coalesce_grad_reduction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def destroy(self) -> None:
        pass


def start(spec: Spec, device: torch.device) -> Any:
    """The engine: bf16 parameters, fp32 masters, AdamW, one backward a window unless told otherwise."""
    if spec.engine == "plain":
        return Plain(spec, device)
    model = build(spec)
    if spec.engine == "deepspeed":
        warnings.simplefilter("ignore", FutureWarning)  # of every collective that it calls by a deprecated name
        import deepspeed

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
        config = {
            "train_micro_batch_size_per_gpu": spec.rows,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": spec.stage},
        }
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    import zeroweave as zw

    compiled: dict[str, Any] = {"enabled": False} if spec.lower == "none" else {"lower": spec.lower}
    settings = {
        "stage": spec.stage,
        # as DeepSpeed keeps them: a window of stages 1 and 2 then begins with the parameters at hand in both
        "gather_after_step": spec.stage < 3 and not spec.graphs,
        "precision": {"params": "bfloat16", "accumulate": spec.accumulate},
        "compile": compiled | {"cuda_graphs": spec.graphs, "memory_budget": "none"},
    }
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    return zw.initialize(model, optimizer, merge(settings, spec.settings))


def window(engine: Any, mode: str, n: int, x: Tensor, collected: Callable[[], None] = lambda: None) -> Tensor:
    """Forwards and backwards of one window, up to its step. `collected()`: before the reduction that ends it.

    Where each backward reduces, that is after the last. Returns the last loss, detached.
    """

    def micro() -> Tensor:
        loss: Tensor = engine(x)
        engine.backward(loss)
        return loss.detach()

    with contextlib.ExitStack() as block:
        if mode == "coalesce":
            block.enter_context(engine.coalesce_grad_reduction())
        elif mode == "no_sync":
            block.enter_context(engine.no_sync())
        for index in range(n):
            last = index == n - 1
            if last and mode == "no_sync":
                collected()
                block.close()
            if mode != "coalesce":
                engine.set_gradient_accumulation_boundary(last)
            loss = micro()
        if mode != "no_sync":
            collected()
    return loss


class Measured:
    """The measurements of one engine on this rank."""

    def __init__(self, spec: Spec, engine: Any, device: torch.device) -> None:
        self._spec, self._engine, self._device = spec, engine, device
        self._cuda = device.type == "cuda"
        torch.manual_seed(1 + dist.get_rank())
        self._x = torch.randn(spec.rows, spec.width, device=device, dtype=torch.bfloat16)

    def row(self, mode: str, n: int) -> Row:
        row = Row(self._spec.engine, self._spec.stage, mode, n)
        for _ in range(self._spec.warm):
            window(self._engine, mode, n, self._x)
            self._engine.step()
        row.backwards_ms = statistics.median(self._timed(mode, n, apart=True) for _ in range(self._spec.rounds))
        row.step_ms = statistics.median(self._timed(mode, n, apart=False) for _ in range(self._spec.rounds))
        row.loss = self._memory(row)
        row.collectives, row.wire = self._traffic(mode, n)
        if self._spec.engine == "zeroweave":
            stats = self._engine.stats
            row.details = {"departures": stats.departures, "on_demand": stats.on_demand_unshards}
            row.details |= {"graphs": stats.graphs, "eager_regions": stats.eager_regions}
            row.details |= {"graphed": stats.graphed_calls, "ungraphed": stats.ungraphed_calls}
            if self._spec.graphs:
                row.pool, row.registered = stats.memory.graphs / MIB, stats.memory.symmetric / MIB
        return row

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _timed(self, mode: str, n: int, apart: bool) -> float:
        """Milliseconds of a window with its step, or, `apart`, of the window alone; the device idle at both ends."""
        dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        window(self._engine, mode, n, self._x)
        if apart:
            self._synchronize()
        middle = time.perf_counter()
        self._engine.step()
        self._synchronize()
        return ((middle if apart else time.perf_counter()) - begin) * 1e3

    def _memory(self, row: Row) -> float:
        """Fills in what a window takes, where somebody counts; returns its last loss."""
        self._synchronize()
        before = self._allocated()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        resident: list[float] = []
        loss = window(self._engine, row.mode, row.n, self._x, lambda: resident.append(self._allocated() - before))
        if self._cuda:
            row.resident, row.flushed = resident[0], self._allocated() - before
            row.peak = torch.cuda.max_memory_allocated(self._device) / MIB - before
        self._engine.step()
        return float(loss)

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated(self._device) / MIB if self._cuda else 0.0

    def _traffic(self, mode: str, n: int) -> tuple[dict[str, int], float]:
        """Collectives of a window and its step, and MiB on the wire: zeroweave's ledger, or the dispatcher's calls."""
        if self._spec.engine == "zeroweave":
            before = self._engine.stats.total
            window(self._engine, mode, n, self._x)
            self._engine.step()
            traffic = {k: t - before[k] if k in before else t for k, t in self._engine.stats.total.items()}
            return {k: t.calls for k, t in traffic.items() if t.calls}, sum(t.wire for t in traffic.values()) / MIB
        if self._spec.engine == "plain":
            return {}, 0.0
        with Dispatched(dist.get_world_size()) as seen:
            window(self._engine, mode, n, self._x)
            self._engine.step()
        return dict(seen.calls), seen.wire / MIB


_TRIPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1}


class Dispatched(TorchDispatchMode):
    """Collectives as PyTorch's dispatcher sees them: calls by kind, and `wire`, bytes that one rank sends.

    Flags and norms, of at most 16 elements, are left out.
    """

    def __init__(self, world: int) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.wire, self._world = 0.0, world

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function.name().replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            kind = next((kind for kind in _TRIPS if kind in name), None)
            elements, size = max((_size(argument) for argument in args), default=(0, 0))
            if kind is not None and elements > 16:
                self.calls[kind] += 1
                self.wire += _TRIPS[kind] * elements * size * (self._world - 1) / self._world
        return function(*args, **(kwargs or {}))


def _size(argument: Any) -> tuple[int, int]:
    """Elements of a tensor or of nested lists of them, and bytes of one."""
    if isinstance(argument, Tensor):
        return argument.numel(), argument.element_size()
    if isinstance(argument, list | tuple) and (sizes := [_size(each) for each in argument]):
        return sum(numel for numel, _ in sizes), max(size for _, size in sizes)
    return 0, 0


def reason(spec: Spec, mode: str, engine: Any) -> str | None:
    """Why an engine cannot run a mode; None where it can."""
    if spec.engine != "deepspeed":
        return None
    if mode == "no_sync" and spec.stage > 1:
        return "no_sync is refused at stages 2 and 3"
    if mode == "coalesce" and not hasattr(engine, "coalesce_grad_reduction"):
        return "this version has no coalesce_grad_reduction"
    return None


def main() -> None:
    path = Path(sys.argv[1])
    spec = Spec(**json.loads(path.read_text()))
    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    engine = start(spec, device)
    measured = Measured(spec, engine, device)
    rows = []
    with (path.parent / f"rank{rank}.rows").open("w") as written:
        for n in spec.backwards:
            for mode in spec.modes:
                missing = reason(spec, mode, engine)
                row = Row(spec.engine, spec.stage, mode, n, missing=missing) if missing else measured.row(mode, n)
                rows.append(asdict(row))
                print(json.dumps(rows[-1]), file=written, flush=True)
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    result = {"rows": rows, "device": name, "torch": torch.__version__}
    if spec.engine == "deepspeed":
        result["version"] = sys.modules["deepspeed"].__version__
    partial = path.parent / f"rank{rank}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(partial.with_suffix(".json"))  # the parent never reads half a record
    engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
