"""Only regions are ever traced: what Dynamo cannot capture runs zeroweave's own code in between, uncompiled."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
import zeroweave.dc
from tests.compile.frame_models import MODELS, PACKAGE, batches, counting_frames, model_of, plainly_trained
from zeroweave.compile.frames import code_of
from zeroweave.errors import UnsupportedError

STEPS = 3


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def train(name: str, stage: int, lower: str, count: int = STEPS) -> zw.Engine:
    """Trains as plain PyTorch does, or an assertion fails. The engine lives."""
    model, inputs = model_of(name), batches(count)
    expected = plainly_trained(model, inputs, loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zw.initialize(model, optimizer, config={"stage": stage, "compile": {"lower": lower}})
    for x in inputs:
        engine.backward(loss_of(engine(x)))
        engine.step()
    with engine.full_parameters():
        found = {key: p.detach().clone() for key, p in model.named_parameters()}
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")
    return engine


@pytest.mark.parametrize("name", ["none", "breaks", "tiles"])
def test_no_frame_of_the_package_is_compiled(name: str) -> None:
    with counting_frames() as frames:
        with train(name, 3, "aot_eager") as engine:
            assert engine.stats.compiled_calls > 0 and engine.stats.eager_regions == {}
    assert any(file == __file__.replace("test_frames", "frame_models") for file, _ in frames.all)
    assert frames.of_package() == set()


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*trains eagerly")
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_no_frame_of_the_package_is_compiled_at_any_stage(name: str, stage: int, lower: str) -> None:
    with counting_frames() as frames:
        with train(name, stage, lower) as engine:
            assert (engine.stats.compiled_calls == 0) == bool(engine.stats.eager_regions)
    assert frames.of_package() == set()


@pytest.mark.filterwarnings("ignore:.*trains eagerly")
def test_a_region_without_a_graph_is_reported() -> None:
    """Graphs made of the package's hooks passed for the region's own, so that nobody was told."""
    with counting_frames() as frames:
        with train("checkpoint", 3, "aot_eager") as engine:
            assert engine.stats.graphs == engine.stats.compiled_calls == 0
            assert "set_checkpoint_early_stop" in engine.stats.eager_regions[""]
    assert frames.of_package() == set()


@pytest.mark.filterwarnings("ignore:.*trains eagerly")
def test_later_engines_train_as_the_first_did() -> None:
    """What Dynamo had made of an earlier engine's hooks ran for a later one, whose runtime it does not know."""
    torch._dynamo.reset()
    for number in range(6):
        engine = train("checkpoint", number % 3 + 1, "aot_eager", count=2)
        engine.destroy()
        del engine
        gc.collect()


def functions_in(source: Path) -> Iterator[CodeType]:
    """The code of all named functions that a file defines, at any depth."""
    pending = [compile(source.read_text(encoding="utf-8"), str(source), "exec")]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if code.co_flags & 1 and not code.co_name.startswith("<"):  # 1: not the body of a class or a module
            yield code


def place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def test_every_function_of_every_module_is_found() -> None:
    names = [".".join(p.relative_to(Path(PACKAGE).parent).with_suffix("").parts) for p in Path(PACKAGE).rglob("*.py")]
    names.remove("zeroweave.demo.model")  # a model, as a user's is
    for name in (name.removesuffix(".__init__") for name in names):
        try:
            module: Any = importlib.import_module(name)
        except (ImportError, UnsupportedError):  # a bridge to a library that is not here, or a kernel without Triton
            assert name.startswith(("zeroweave.integrations.", "zeroweave._triton."))
            continue
        own = {value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name}
        bridges = {value.__name__ for value in own if issubclass(value, nn.Module)}
        missing = {place(c) for c in functions_in(Path(module.__file__))} - {place(c) for c in code_of(module)}
        kernels = {each for each, value in vars(module).items() if hasattr(value, "fn")}  # of a GPU, where Triton is
        assert not {what for what in missing if what[0].split(".")[0] not in bridges | kernels}, f"{name}: {missing}"
        assert not bridges or name.startswith("zeroweave.integrations."), f"{name}: {bridges}"
    assert "zeroweave.dc.runtime" in sys.modules
