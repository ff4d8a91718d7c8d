"""References that outlive a step: those of user code show new values, those of a transport's threads delay nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave.comm import process_group


class Keeping(nn.Module):
    """Keeps a view of its weight, on some ranks."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.weight, self.keeps = nn.Parameter(torch.randn(8, 8) / 8), keeps
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.kept = self.weight.t()
        return torch.tanh(F.linear(x, self.weight))


def shows(engine: Any, block: Keeping) -> bool:
    value = engine.full("1.weight")
    return block.kept is None or torch.equal(block.kept, value.t())


def kept_views(stage: int, keepers: tuple[int, ...]) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Keeping(n == 1 and dist.get_rank() in keepers) for n in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = []
    with zw.initialize(model, optimizer, {"stage": stage, "compile": {"enabled": False}}) as engine:
        block = model[1]
        for _ in range(3):
            before = engine.full("1.weight")
            engine.backward(engine(torch.ones(2, 8)).pow(2).mean())
            engine.step()
            right += [shows(engine, block), not torch.equal(engine.full("1.weight"), before)]
        state = {name: value + 1 for name, value in engine.state_dict().items()}
        engine.load_state_dict(state)
        right.append(shows(engine, block))
        with engine.profiling():
            engine.backward(engine(torch.ones(2, 8)).pow(2).mean())
            engine.step()
        right.append(shows(engine, block))
        block.kept = None
        engine.backward(engine(torch.ones(2, 8)).pow(2).mean())
        block.kept = None
        engine.step()
        right.append(not any(bucket.resident for bucket in engine._runtime.buckets.values()))
    return right


@pytest.mark.parametrize("keepers", [(0,), pytest.param((0, 1), marks=pytest.mark.matrix)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.matrix), 2, 3])
def test_a_view_that_is_kept_shows_new_values(pools: Pools, stage: int, keepers: tuple[int, ...]) -> None:
    """As a view of an ordinary parameter does; on any rank, for as long as it is kept."""
    for right in pools(2).run(kept_views, stage, keepers):
        assert all(right), right


class Late:
    """A transport whose threads let go of what collectives are handed half a second late."""

    held: ClassVar[list[object]] = []

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.rank, self.world = inner.rank, inner.world

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_reduce_sum"):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            views = [each.detach() for each in args if isinstance(each, Tensor)]
            self.held.append(views)
            threading.Timer(0.5, lambda: self.held.remove(views)).start()
            return method(*args, **kwargs)

        return call


def held_references(stage: int, lower: str | None) -> tuple[bool, int]:
    """Are the values those of a run whose transport lets go at once? And how many references there were at a step."""
    runs, most = [], 0
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        compile_ = {"enabled": False} if lower is None else {"lower": lower}
        with zw.initialize(model, optimizer, {"stage": stage, "compile": compile_}) as engine:
            if late:
                engine._context.transport.wrap(Late)
            for step in range(12):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                engine.backward(engine(x).pow(2).mean())
                most = max(most, len(Late.held))
                engine.step()
            runs.append(engine.state_dict())
    return all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]), most


@daily(("stage", "lower"), [(3, None)], [(1, None), (2, "aot_eager"), (3, "aot_eager")])
def test_references_that_are_let_go_late_end_nothing(pools: Pools, stage: int, lower: str | None) -> None:
    for same, most in pools(2).run(held_references, stage, lower):
        assert same and most > 0


def handed_over() -> list[tuple[str, bool]]:
    """For each collective of the backend, whether what it is handed is the storage that a bucket counts."""
    seen: list[tuple[str, bool]] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"compile": {"enabled": False}}) as engine:
        counted = {bucket.storage.data_ptr(): bucket.storage._cdata for bucket in engine._runtime.buckets.values()}

        def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(output: Tensor, *args: Any, **kwargs: Any) -> Any:
                for bucket in engine._runtime.buckets.values():
                    if bucket.resident and bucket.storage.data_ptr() == output.data_ptr():
                        seen.append((name, bucket.storage._cdata == output.untyped_storage()._cdata))
                return function(output, *args, **kwargs)

            return call

        before, process_group.all_gather = process_group.all_gather, watched("gather", process_group.all_gather)
        try:
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
        finally:
            process_group.all_gather = before
        assert counted
    return seen


def test_the_backend_is_handed_memory_and_not_the_storage(pools: Pools) -> None:
    for seen in pools(2).run(handed_over):
        assert seen and not any(same for _, same in seen), seen
