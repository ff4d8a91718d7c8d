"""Frozen weights at stages 1 and 2: gathered once, and again when something has changed them, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import MODES, daily, slow
from zeroweave.errors import ParameterError

pytestmark = pytest.mark.usefixtures("flats_apart")

WIDTH = 8


class Block(nn.Module):
    """A frozen layer and a trained change of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


FROZEN = 3
"""Buckets that are, and as many are not."""


@contextmanager
def adapted(stage: int, mode: str = "eager", **more: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {"stage": stage, "compile": MODES[mode], **more}
    with zw.initialize(model, torch.optim.AdamW(trained, lr=1e-2), config) as engine:
        yield engine


def batch(index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


def gathers(engine: Any) -> int:
    """How many there were so far; the ledger counts none in a world of one."""
    return sum(bucket.gathers for bucket in engine._runtime.buckets.values())


def step(engine: Any, index: int = 0) -> int:
    """Trains one step; how many gathers it took."""
    before = gathers(engine)
    for micro in range(engine.config.gradient_accumulation_steps):
        engine.train_step(batch(100 * index + micro), lambda output, _: output.square().mean())
    return gathers(engine) - before


def losses(engine: Any, count: int = 3) -> list[float]:
    return [float(engine.train_step(batch(i), lambda output, _: output.square().mean())) for i in range(count)]


def outputs(engine: Any) -> Tensor:
    with torch.no_grad():
        return engine(batch(7)).clone()


def base(engine: Any) -> str:
    return "blocks.1.base.weight"


@pytest.mark.parametrize("mode", MODES)
@daily(("stage", "gas"), [(2, 1), (1, 2)], [(1, 1), (2, 2)])
def test_from_the_second_step_on_they_are_not_gathered(stage: int, gas: int, mode: str) -> None:
    with adapted(stage, mode, gradient_accumulation_steps=gas) as engine:
        found = [step(engine, index) for index in range(6)]
        assert found == [2 * FROZEN] + [FROZEN] * 5
        stats = engine.stats
        assert (stats.departures, stats.on_demand_unshards) == (0, 0)
        assert engine.executed == engine.schedule.instructions
        names = {b.id: b.name for b in engine.schedule.facts.buckets}
        assert {names[b] for b in engine.schedule.stays} == {b.name for b in engine.buckets if not b.requires_grad}
        assert stats.memory.flats_peak == sum(b.nbytes for b in engine.buckets)
        # at rest user code sees stubs, whatever lies in memory
        with pytest.raises(ParameterError):
            engine.module.blocks[0].base.weight.sum()


@slow("aot_eager")
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_same_training_as_at_stage_3(mode: str) -> None:
    found = []
    for stage, keep in ((1, "none"), (2, "none"), (3, "none"), (3, "all")):
        with adapted(stage, mode) as engine:
            engine.reschedule(keep=keep)
            found.append((losses(engine, 5), {k: v.tolist() for k, v in engine.state_dict().items()}))
            assert step(engine) == {(3, "none"): 10, (3, "all"): FROZEN}.get((stage, keep), FROZEN) or mode != "eager"
    assert all(each == found[0] for each in found)


def rewritten(engine: Any, how: str, folder: Path) -> None:
    """The frozen layer of the second block is all 0.5 from now on."""
    whole = torch.full((WIDTH, WIDTH), 0.5)
    match how:
        case "set_full":
            engine.set_full(base(engine), whole)
        case "set_local":
            engine.set_local(base(engine), whole.flatten())
        case "full_parameters":
            with engine.full_parameters() as full, torch.no_grad():
                full[base(engine)].copy_(whole)
        case "load_state_dict":
            engine.load_state_dict({**engine.state_dict(), base(engine): whole})
        case "load":
            before = engine.state_dict()
            engine.load_state_dict({**before, base(engine): whole})
            engine.save(folder)
            engine.load_state_dict(before)
            step(engine)
            engine.load(folder)


WAYS = ("set_full", "set_local", "full_parameters", "load_state_dict", "load")


@daily(("stage", "how"), [(2, how) for how in WAYS], [(stage, how) for stage in (1, 3) for how in WAYS])
def test_new_values_are_seen_at_once(stage: int, how: str, tmp_path: Path) -> None:
    """In an evaluation, and in the next step, as in an engine that has never gathered the old ones."""
    with adapted(stage, compile={"enabled": False, "keep": "all"}) as engine:
        for index in range(3):
            step(engine, index)
        before = outputs(engine)
        rewritten(engine, how, tmp_path)
        values = engine.state_dict()
        assert values[base(engine)].eq(0.5).all()
        seen, trained = outputs(engine), losses(engine, 1)
        assert not torch.equal(before, seen)
        step(engine)
        assert step(engine) == FROZEN  # and they stay again
    with adapted(3, compile={"enabled": False, "keep": "none"}) as fresh:
        fresh.load_state_dict(values)
        assert torch.equal(outputs(fresh), seen)
        assert losses(fresh, 1) == trained


def test_only_what_was_written_is_gathered_again() -> None:
    with adapted(2) as engine:
        for index in range(3):
            step(engine, index)
        engine.set_full(base(engine), torch.zeros(WIDTH, WIDTH))
        assert [step(engine), step(engine)] == [FROZEN + 1, FROZEN]


@daily(("stage", "data"), [(2, False)], [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("name", ["blocks.1.base.weight", "blocks.1.up.weight"])
def test_nothing_of_a_block_that_ends_with_an_exception_is_kept(stage: int, data: bool, name: str) -> None:
    """Whether an evaluation has left the buckets gathered or not."""
    with adapted(stage, compile={"enabled": False, "keep": "all"}) as engine:
        for index in range(3):
            step(engine, index)
            before = outputs(engine) if index else None
            with pytest.raises(KeyError), engine.full_parameters() as full, torch.no_grad():
                (full[name].data if data else full[name]).fill_(0.5)
                raise KeyError
            assert before is None or torch.equal(outputs(engine), before)
        assert not engine.state_dict()[name].eq(0.5).all()


def test_zero_grad_and_evaluations_cost_no_gather() -> None:
    with adapted(2) as engine:
        for index in range(4):
            before = gathers(engine)
            step(engine, index)
            engine.zero_grad()
            outputs(engine)
            engine.backward(engine(batch(index)).sum())
            engine.zero_grad()
        assert gathers(engine) - before == 2 * FROZEN  # of what was trained: for the step, and once behind it


class Stumbles(Exception):
    pass


def test_after_an_exception_they_are_gathered_again() -> None:
    """Nobody knows what has become of them."""
    with adapted(2) as engine:
        for index in range(3):
            step(engine, index)
        expected = outputs(engine)

        def stumble(*_: Any) -> None:
            raise Stumbles

        hook = engine.module.blocks[1].up.register_forward_hook(stumble)
        with pytest.raises(Stumbles):
            engine(batch(0))
        hook.remove()
        before = gathers(engine)
        engine.zero_grad()
        assert torch.equal(outputs(engine), expected)
        assert gathers(engine) - before == 2 * FROZEN
        assert [step(engine), step(engine)] == [0, FROZEN]


def test_a_write_in_a_forward_is_an_error_and_has_no_effect() -> None:
    with adapted(2) as engine:
        for index in range(3):
            step(engine, index)
        expected = outputs(engine)

        def write(module: nn.Module, *_: Any) -> None:
            with torch.no_grad():
                module.weight.mul_(2.0)

        hook = engine.module.blocks[1].base.register_forward_hook(write)
        with pytest.raises(ParameterError, match="written in place"):
            engine(batch(0))
        hook.remove()
        engine.zero_grad()
        assert torch.equal(outputs(engine), expected)


def test_another_module_that_writes_them_is_seen_at_the_end_of_the_step() -> None:
    """Not in a call that uses them: when their hold is dropped, as if their storage went."""
    with adapted(2) as engine:
        for index in range(3):
            step(engine, index)
        expected, blocks = outputs(engine), engine.module.blocks

        def write(*_: Any) -> None:
            with torch.no_grad():
                blocks[0].base.weight.mul_(2.0)

        hook = blocks[2].up.register_forward_hook(write)
        with pytest.raises(ParameterError, match=r"blocks\.0\.base\.weight"):
            step(engine)
        hook.remove()
        engine.zero_grad()
        assert torch.equal(outputs(engine), expected)


@pytest.mark.parametrize("steps", [0, 2])
def test_profiling_leaves_no_values_behind(steps: int) -> None:
    """Inside, gathers bring nothing: neither before nor after the first real one may it be taken for values."""
    with adapted(2) as engine, adapted(3) as plain:
        for index in range(steps):
            step(engine, index)
            step(plain, index)
        with engine.profiling():
            assert step(engine) + step(engine) == (2 if steps else 3) * FROZEN
        assert losses(engine) == losses(plain)


def test_at_stage_3_another_schedule_lets_them_go() -> None:
    with adapted(3, compile={"enabled": False, "keep": "all"}) as engine:
        for index in range(3):
            step(engine, index)
        frozen = sum(b.nbytes for b in engine.buckets if not b.requires_grad)
        assert engine._runtime.flats.now == frozen and step(engine) == FROZEN
        engine.reschedule(keep="none")
        assert engine._runtime.flats.now == 0 and step(engine) > FROZEN
        engine.reschedule(keep=["blocks.1:frozen"])
        step(engine)
        assert engine._runtime.flats.now == frozen // FROZEN


def test_they_are_gone_when_the_engine_is() -> None:
    with adapted(2) as engine:
        step(engine)
        assert engine._runtime.flats.now > 0
    assert engine._runtime.flats.now == 0


def test_values_can_be_shown_between_steps() -> None:
    with adapted(2, gather_after_step=True) as engine:
        assert [step(engine, index) for index in range(4)][1:] == [FROZEN] * 3
        assert engine.module.blocks[0].base.weight.isfinite().all()
