"""Tensors without memory, operators that are heard of, and dispatch modes that do not see what the engine does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zeroweave._torch.modes import OperatorMode, counted_operations, fake_tensors, operator_name, unseen, value_errors

pytestmark = pytest.mark.oldest


class Watch(TorchDispatchMode):
    def __init__(self, seen: list[str], name: str) -> None:
        super().__init__()
        self._seen, self._name = seen, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(f"{self._name} {func}")
        return func(*args, **(kwargs or {}))


def modes(seen: list[str]) -> tuple[Any, ...]:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(f"policy {func}")
        return CheckpointPolicy.PREFER_RECOMPUTE

    return Watch(seen, "outer"), create_selective_checkpoint_contexts(policy)[0], Watch(seen, "inner")


def test_selective_checkpointing_does_not_see_what_others_do() -> None:
    seen: list[str] = []
    x = torch.ones(2)
    with ExitStack() as stack:
        for mode in modes(seen):
            stack.enter_context(mode)
        before = _get_current_dispatch_mode_stack()
        with unseen():
            x.mul(2)
        assert sorted(seen) == ["inner aten.mul.Tensor", "outer aten.mul.Tensor"]
        seen.clear()
        with pytest.raises(ZeroDivisionError), unseen():
            raise ZeroDivisionError
        assert _get_current_dispatch_mode_stack() == before
        x.add(1)
    assert sorted(seen) == ["inner aten.add.Tensor", "outer aten.add.Tensor", "policy aten.add.Tensor"]


def test_where_nobody_watches_nothing_changes() -> None:
    seen: list[str] = []
    with unseen():
        torch.ones(2).mul(2)
    with Watch(seen, "outer"), unseen():
        torch.ones(2).mul(2)
    assert "outer aten.mul.Tensor" in seen


class Heard(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def ran(self, operator: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        self.names.append(operator_name(operator))


def test_a_view_of_a_freed_storage_leaves_it_freed() -> None:
    with fake_tensors():
        flat = torch.empty(8)
        storage = flat.untyped_storage()
        for _ in range(2):  # the second time, a cache would know the result
            flat.view_as(flat)
            storage.resize_(0)
            flat.view_as(flat)
            assert storage.nbytes() == 0
            storage.resize_(32)


def test_values_cannot_be_asked_for() -> None:
    with fake_tensors(), pytest.raises(value_errors()):
        torch.ones(3).sum().item()


def test_operators_are_heard_of_where_they_run_by_themselves_and_dynamo_still_compiles() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(lambda x: x.sin(), backend=backend)
    with fake_tensors(), Heard() as heard:
        run(torch.ones(3).cos())
    assert len(graphs) == 1 and "cos" in heard.names


def test_the_operations_of_a_matmul_are_counted() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    assert counted_operations(torch.ops.aten.mm.default, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    assert counted_operations(torch.ops.aten.sin.default, (a,), {}, a) == 0
    assert counted_operations(torch.ops.aten.sin_.default, (a,), {}, a) == 0


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_what_writes_has_the_operations_of_what_returns(name: str) -> None:
    """Every operator of that family that PyTorch has: backwards write gradients where they are reduced from."""
    shape = (4, 2, 3) if "b" in name else (2, 3)
    a, b = torch.zeros(shape), torch.zeros(*shape[:-2], 3, 5)
    out = a @ b
    adds = "add" in name
    args = (out, a, b) if adds else (a, b)
    returns = counted_operations(getattr(torch.ops.aten, name).default, args, {}, out)
    assert returns == 2 * out.numel() * 3
    if adds:
        writes = getattr(torch.ops.aten, f"{name}_").default
        assert counted_operations(writes, args, {"beta": 0}, out) == returns
