"""Writes that were made on some ranks only, or differently, are refused by name before anything is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.zoo import Block, Stack, rows
from zeroweave.errors import EngineError


def engine_of(stage: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    module = Stack(lambda index: Block())
    config = {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": 60.0, **settings}
    return zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.05), config)


def steps(engine: Any, count: int) -> None:
    for index in range(count):
        x, y = rows(engine.rank, index)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()


def values(engine: Any) -> dict[str, torch.Tensor]:
    with engine.full_parameters() as full:
        return {name: parameter.detach().clone() for name, parameter in full.items()}


def write(engine: Any, how: str) -> None:
    """Differs between ranks, always."""
    with engine.full_parameters() as full, torch.no_grad():
        first, last = next(iter(full.values())), list(full.values())[-1]
        if how == "everything" and engine.rank == 0:
            for parameter in full.values():
                parameter.fill_(7.0)
        elif how == "one element" and engine.rank == 1:
            first.view(-1)[0] += 1.0
        elif how == "last" and engine.rank == 0:
            last.view(-1)[-1] += 1.0
        elif how == "data" and engine.rank == 0:
            last.data.view(-1)[-1] += 1.0
        elif how == "differently":
            first.fill_(float(engine.rank))
        elif how == "load" and engine.rank == 0:
            other = Stack(lambda index: Block())
            engine.module.load_state_dict(other.state_dict())


HOW = ["everything", "one element", "last", "data", "differently", "load"]


def refused(stage: int, gather: bool, hows: list[str]) -> int:
    """After each refusal the old values are there, and training goes on as if nothing had been written."""
    with engine_of(stage, gather_after_step=gather) as engine, engine_of(stage) as other:
        steps(engine, 2)
        steps(other, 2)
        before = values(engine)
        names = list(before)
        for how in hows:
            name = names[-1] if how in ("last", "data") else names[0]
            only = {"everything": r" \(written on rank 0 only\)", "one element": r" \(written on rank 1 only\)"}
            with pytest.raises(EngineError, match=f"different values of '{name}'" + only.get(how, "")):
                write(engine, how)
            after = values(engine)
            assert all(torch.equal(before[name], after[name]) for name in names), how
        steps(engine, 2)
        steps(other, 2)
        wanted, found = values(other), values(engine)
        assert all(torch.equal(wanted[name], found[name]) for name in names)
        return int(engine.global_steps)


@pytest.mark.parametrize(("stage", "gather"), [(3, False), pytest.param(2, True, marks=pytest.mark.matrix)])
def test_torn_writes_are_refused(pools: Pools, stage: int, gather: bool) -> None:
    assert pools(2).run(refused, stage, gather, HOW) == [4, 4]


@pytest.mark.matrix
@pytest.mark.parametrize("world", [3, 4])
def test_torn_writes_are_refused_in_larger_worlds(pools: Pools, world: int) -> None:
    assert pools(world).run(refused, 2, True, HOW) == [4] * world


def equal_writes() -> bool:
    """Not a number, negative zero and last bits: what is the same on all ranks is kept, whatever it is."""
    with engine_of(3) as engine:
        steps(engine, 1)
        with engine.full_parameters() as full, torch.no_grad():
            parameter = next(iter(full.values()))
            parameter.view(-1)[0], parameter.view(-1)[1] = float("nan"), -0.0
            wanted = parameter.detach().clone()
        return torch.equal(next(iter(values(engine).values())).view(torch.int32), wanted.view(torch.int32))


def test_equal_writes_are_kept(pools: Pools) -> None:
    assert pools(2).run(equal_writes) == [True, True]


def left_by_an_exception(everywhere: bool) -> list[str]:
    """Writes are dropped on all ranks where the block ends with an exception on one, and the engine goes on."""
    told: list[str] = []
    with engine_of(3) as engine:
        before = values(engine)
        try:
            with engine.full_parameters() as full, torch.no_grad():
                for parameter in full.values():
                    parameter.zero_()
                if everywhere or engine.rank == 1:
                    raise KeyError("a user's mistake")
        except (KeyError, EngineError) as error:
            told.append(str(error))
        after = values(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        steps(engine, 2)
    return told


def test_an_exception_inside_keeps_nothing(pools: Pools) -> None:
    assert pools(2).run(left_by_an_exception, True) == [['"a user\'s mistake"']] * 2
    one, two = pools(2).run(left_by_an_exception, False)
    assert two == ['"a user\'s mistake"']
    assert len(one) == 1 and "rank 1 left full_parameters() with an exception" in one[0]


def other_values_for_set_full(what: str) -> bool:
    with engine_of(2) as engine:
        steps(engine, 1)
        name = next(iter(dict(engine.module.named_parameters())))
        if what == "grad":
            x, y = rows(engine.rank, 5)
            engine.backward(F.mse_loss(engine(x), y))
        before = engine.full(name, what)
        with pytest.raises(EngineError, match=f"set_full.. of '{name}': the ranks have different values"):
            engine.set_full(name, before + dist.get_rank(), what)
        assert torch.equal(engine.full(name, what), before)
        engine.set_full(name, before + 1.0, what)
        return bool(torch.equal(engine.full(name, what), before + 1.0))


@pytest.mark.parametrize("what", ["param", pytest.param("grad", marks=pytest.mark.matrix)])
def test_set_full_compares_its_values(pools: Pools, what: str) -> None:
    assert pools(2).run(other_values_for_set_full, what) == [True, True]
