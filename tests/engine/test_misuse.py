"""Misuse of an engine: each a clear message, never a crash and never a silent no-op."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import daily, slow
from zeroweave.errors import EngineError, ParameterError, ZeroweaveError

pytestmark = pytest.mark.usefixtures("flats_apart")

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
LOWERINGS = pytest.mark.parametrize("lower", ["eager", "aot_eager"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Writing(Block):
    writes = True

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.write()
        return super().forward(x)

    def write(self) -> None:
        with torch.no_grad():
            self.scale.clamp_(0.5, 0.9)


class WritingLater(Writing):
    """Writes once it is told to."""

    writes = False


class Replacing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        return super().forward(x)


class Unfreezing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.requires_grad_(False)
        return super().forward(x)


class MovingLater(WritingLater):
    def write(self) -> None:
        self.scale.data = torch.full((8,), 2.0)


def engine_of(
    block: type[Block] = Block, stage: int = 3, lower: str = "eager", frozen: Sequence[int] = (), **settings: Any
) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*(block() for _ in range(3)))
    for index in frozen:
        module[index].requires_grad_(False)
    compile_ = {"enabled": False} if lower == "eager" else {"lower": lower}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    return zw.initialize(module, optimizer, {"stage": stage, "compile": compile_, **settings})


def loss_of(engine: Any) -> Tensor:
    return F.mse_loss(engine(torch.ones(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("stage", "by_block", "keep", "frozen"),
    [
        (1, 2, None, ()),
        (2, 2, None, ()),
        (3, 1, "all", ()),
        (3, 2, "none", ()),
        (3, 2, "all", ()),
        (3, 3, "none", ()),
        (3, 1, "all", (0, 1)),
        (3, 2, "all", (0, 1)),
    ],
)
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("block", [WritingLater, MovingLater])
def test_a_write_is_refused_in_its_forward_whoever_holds_the_bucket(
    block: type[Writing], stage: int, by_block: int, keep: str | None, frozen: tuple[int, ...], index: int
) -> None:
    """A schedule may hold it over the end of the call, and up to the end of the window, behind the updates."""
    compile_ = {"enabled": False, **({"keep": keep} if keep else {})}
    engine = engine_of(block, stage, frozen=frozen, compile=compile_, bucket={"by_block": by_block})
    for _ in range(6):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.schedule is not None
    before = {f"{number}.scale": engine.full(f"{number}.scale") for number in range(3)}
    engine.module[index].writes = True
    how = "written in place" if block is WritingLater else "was replaced by another tensor"
    with pytest.raises(ParameterError, match=f"'{index}.scale' {how} during a call"):
        loss_of(engine)
    engine.module[index].writes = False
    engine.zero_grad()
    assert all(torch.equal(engine.full(name), scale) for name, scale in before.items())
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.global_steps == 7
    assert engine.full(f"{index}.scale").equal(before[f"{index}.scale"]) == (index in frozen)
    engine.destroy()


@STAGES
@pytest.mark.parametrize("share", [Tensor.numpy, Tensor.share_memory_])
def test_memory_of_a_parameter_that_others_share_is_told(stage: int, share: Callable[[Tensor], object]) -> None:
    """They keep it for good; what is copied first is the program's own."""
    with engine_of(stage=stage) as engine:
        with engine.full_parameters() as full:
            copy = full["0.scale"].detach().clone()
            share(copy)
        assert copy.sum() == 8
    engine = engine_of(stage=stage)
    engine.backward(loss_of(engine))
    engine.step()
    told = r"an array of NumPy, or another process, shares the memory of '0'.*detach\(\).clone\(\)"
    with pytest.raises(EngineError, match=told), engine.full_parameters() as full:
        share(full["0.scale"].detach())
        full["0.scale"].data.fill_(2.0)
    for _ in range(2):
        with pytest.raises(EngineError, match=told):
            loss_of(engine)
        engine.zero_grad()
    assert engine.state_dict()["0.scale"].eq(2.0).all()
    engine.destroy()
    assert engine.module[0].scale.eq(2.0).all()


@STAGES
def test_a_step_without_a_backward(stage: int) -> None:
    with engine_of(stage=stage) as engine:
        with pytest.raises(EngineError, match="backward"):
            engine.step()
        engine.backward(loss_of(engine))
        engine.step()
        with pytest.raises(EngineError, match="backward"):
            engine.step()
        engine.zero_grad()
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.global_steps == 2


@slow("aot_eager-1")
@STAGES
@LOWERINGS
def test_a_destroyed_engine(stage: int, lower: str) -> None:
    engine = engine_of(stage=stage, lower=lower)
    engine.backward(loss_of(engine))
    engine.step()
    right = engine.state_dict()
    module = engine.module
    engine.destroy()
    engine.destroy()
    for attempt in (
        lambda: engine(torch.ones(2, 8)),
        lambda: engine.train_step((torch.ones(2, 8),), lambda out, batch: out.sum()),
        engine.step,
        engine.state_dict,
        lambda: engine.full_parameters().__enter__(),
    ):
        with pytest.raises(EngineError, match="destroy"):
            attempt()
    for name, parameter in module.named_parameters():
        try:
            assert torch.equal(parameter.detach(), right[name])
        except ParameterError:
            pass


@STAGES
@LOWERINGS
@daily("block", [Writing, Unfreezing], [Replacing])
def test_a_module_that_changes_its_parameters(stage: int, lower: str, block: type[Block]) -> None:
    engine = engine_of(block, stage, lower)
    with pytest.raises(ZeroweaveError, match=r"\d\.scale"):
        engine.backward(loss_of(engine))
        engine.step()
    engine.destroy()


@STAGES
def test_requires_grad_inside_of_a_forward(stage: int) -> None:
    with engine_of(stage=stage) as engine:
        scale = engine.module[0].scale
        for touched in (lambda: engine.module[0].scale, lambda: scale):
            handle = engine.module[0].register_forward_hook(lambda *_: touched().requires_grad_(False) and None)  # noqa: B023
            with pytest.raises(ParameterError, match=r"requires_grad.*0\.scale.*between"):
                engine.backward(loss_of(engine))
                engine.step()
            handle.remove()
            engine.zero_grad()
        assert scale.requires_grad
        engine.backward(loss_of(engine))
        engine.step()


@pytest.mark.parametrize("given", [torch.zeros(2), torch.zeros((), dtype=torch.float64)])
@STAGES
def test_a_hook_that_returns_something_else(stage: int, given: Tensor) -> None:
    with engine_of(stage=stage) as engine:
        handle = engine.module[0].scale.register_hook(lambda gradient: given)
        with pytest.raises(ParameterError, match=r"hook of '0\.scale' must return None or torch\.float32"):
            engine.backward(loss_of(engine))
        handle.remove()
        engine.zero_grad()
        engine.backward(loss_of(engine))
        engine.step()


@STAGES
@LOWERINGS
def test_a_backward_twice_through_one_graph(stage: int, lower: str) -> None:
    with engine_of(stage=stage, lower=lower) as engine:
        loss = loss_of(engine)
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="second time"):
            engine.backward(loss)
        engine.zero_grad()
        engine.backward(loss_of(engine))
        engine.step()


@STAGES
@LOWERINGS
def test_a_loss_kept_across_a_step(stage: int, lower: str) -> None:
    """The weights have changed since the forward: an error as in PyTorch, or ours, but never a number."""
    with engine_of(stage=stage, lower=lower) as engine:
        late = loss_of(engine)
        engine.backward(loss_of(engine))
        engine.step()
        with pytest.raises(RuntimeError):
            engine.backward(late)
        engine.zero_grad()
        del late
        engine.backward(loss_of(engine))
        engine.step()


@pytest.fixture
def config_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"stage": 2, "compile": {"enabled": False}}))
    yield path


def test_a_config_from_a_file(config_file: Path) -> None:
    module = Block()
    with zw.initialize(module, None, str(config_file)) as engine:
        assert engine.config.stage == 2
    config_file.write_text("{")
    with pytest.raises(ZeroweaveError, match=r"engine\.json"):
        zw.initialize(Block(), None, config_file)


def test_two_engines_in_turn() -> None:
    with engine_of(stage=3) as one, engine_of(stage=2, lower="aot_eager") as other:
        for _ in range(3):
            for engine in (one, other):
                engine.backward(loss_of(engine))
            for engine in (one, other):
                engine.step()
        first, second = one.state_dict(), other.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@STAGES
def test_a_plain_backward_in_a_window_warns_once(stage: int) -> None:
    with engine_of(stage=stage, gradient_accumulation_steps=2) as engine:
        with pytest.warns(UserWarning, match="gradient_accumulation_steps"):
            loss_of(engine).backward()
        engine.step()
        loss_of(engine).backward()
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("change", ["taken out", "moved"])
def test_parameters_stay_in_their_groups(change: str) -> None:
    """Also where the list is the same: progressive freezing takes parameters out of it."""
    engine = engine_of()
    engine.backward(loss_of(engine))
    first = engine.optimizer.param_groups[0]["params"]
    first.pop() if change == "taken out" else first.append(first.pop(0))
    with pytest.raises(ParameterError, match=r"groups changed.*engine.destroy\(\)"):
        engine.step()
    engine.destroy()
