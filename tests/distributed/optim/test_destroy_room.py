"""destroy() where there is little room: the optimizer's state goes to host memory, or is dropped, and that is said."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroweave as zw
from tests.distributed.optim.test_optimizer_state import all_of, build, differing, settings, train
from tests.support.harness import Outcome, Pools
from zeroweave.engine.state_dict import FullValues
from zeroweave.optim.state_memory import Room
from zeroweave.optim.states import describe

PLENTY = 2**40
SOME = 12 * 2**10
"""Bytes through which each bucket of `Net` passes, and which its whole state does not fit"""
ROOMS: dict[str, Callable[[int], Room]] = {
    "device": lambda rank: Room("here", 0, PLENTY),
    "host": lambda rank: Room("here", PLENTY, PLENTY if rank else SOME),
    "nowhere": lambda rank: Room("here", 0 if rank else PLENTY, None),
}


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def destroyed(engine: Any, where: str, **options: Any) -> list[str]:
    """Ends the engine where there is room on rank 0 or 1 in certain memories; returns the warnings."""
    room = ROOMS[where](rank_of())
    with patch.object(Room, "now", lambda device: room), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.destroy(**options)
        assert engine.destroy() is None
    assert all(one.filename == __file__ for one in caught), "at the user's line"
    return [str(one.message) for one in caught if "optimizer's state" in str(one.message)]


# ---------------------------------------------------------------------- where it goes
def through(where: str, stage: int) -> tuple[list[str], list[str]]:
    """What differs between a training that went on and one that came out of the engine and went in again; warnings."""
    found, told = [], []
    for parts in ((range(4),), (range(2), range(2, 4))):
        model, optimizer = build()
        for steps in parts:
            engine = zw.initialize(model, optimizer, settings(stage))
            train(engine, steps)
            told += destroyed(engine, where)
        found.append(all_of(model, optimizer))
    assert "layers.0.weight exp_avg" in found[0]
    return differing(*found), told


@pytest.mark.parametrize(
    ("where", "stage"), [("host", 3), *(pytest.param(w, 2, marks=pytest.mark.matrix) for w in ("host", "device"))]
)
def test_training_goes_on_through_either_memory(pools: Pools, where: str, stage: int) -> None:
    assert pools(2).run(through, where, stage) == [([], [])] * 2


def test_the_state_lies_on_the_device_or_in_host_memory() -> None:
    """Of the device "meta" no value can be copied to host memory, and PyTorch says so."""
    model, optimizer = build()
    engine = zw.initialize(model, optimizer, settings(2))
    train(engine, range(1))
    context = engine._context
    with patch.object(context.optimizer, "_device", torch.device("meta")):
        gathered = context.optimizer.gather(context.transport, context.control, Room("here", PLENTY, PLENTY))
        assert {held["exp_avg"].device.type for held in gathered.states.values()} == {"meta"}
        assert {held["step"].device.type for held in gathered.states.values()} == {"cpu"}
        with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
            context.optimizer.gather(context.transport, context.control, Room("here", PLENTY, SOME))
    engine.destroy()


# ---------------------------------------------------------------------- nowhere
def dropped(where: str, options: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Warnings, the keys of the state that is left, and what differs of the parameters."""
    kept = []
    for room, more in (("device", {}), (where, options)):
        model, optimizer = build()
        engine = zw.initialize(model, optimizer, settings(3))
        train(engine, range(2))
        told = destroyed(engine, room, **more)
        kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
    left = sorted(map(str, optimizer.state))
    with zw.initialize(model, optimizer, settings(2)) as engine:  # and it trains, from an empty state
        train(engine, range(1))
    assert all(held["step"] == 1 for held in optimizer.state.values())
    return told, left, differing(*kept)


def test_no_room_is_told_once_and_ends_nothing(pools: Pools) -> None:
    (told, left, changed), (others, left_1, changed_1) = pools(2).run(dropped, "nowhere", {})
    assert (left, changed, left_1, changed_1, others) == ([], [], [], [], [])
    (text,) = told
    for words in (
        "dropped the optimizer's state",
        "GiB on each rank",
        "a machine has 0 GiB of host memory, 2 ranks there need",
        "The parameters are complete",
        "engine.full(name, key)",
        "optimizer_state=False",
    ):
        assert words in text, text


def test_a_state_that_is_not_wanted(pools: Pools) -> None:
    assert pools(2).run(dropped, "device", {"optimizer_state": False}) == [([], [], [])] * 2


def wanted_on(rank: int) -> None:
    model, optimizer = build()
    engine = zw.initialize(model, optimizer, settings(3))
    train(engine, range(1))
    engine.destroy(optimizer_state=engine.rank == rank)


@pytest.mark.matrix
def test_ranks_that_want_different_things(disposable: Pools) -> None:
    outcomes: list[Outcome] = disposable(2).outcomes(wanted_on, 1, deadline=120.0)
    text = "\n".join(f"{one.message} {one.stderr}" for one in outcomes)
    assert all(one.failed for one in outcomes) and "destroy(optimizer_state=False)" in text, text


# ---------------------------------------------------------------------- the memory it takes
class Flats(TorchDispatchMode):
    """Notes for each flat that is made how many of the earlier ones are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []
        self.alive: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = func is torch.ops.aten.empty.memory_format
        if flat:
            self.alive.append(sum(one() is not None for one in self._made))
        made = func(*args, **(kwargs or {}))
        if flat:
            self._made.append(weakref.ref(made.untyped_storage()))
        return made


def one_bucket_at_a_time() -> tuple[list[int], list[int], int]:
    """How many flats were alive as each was made, of parameters and of states; and how many buckets there are."""
    model, optimizer = build()
    engine = zw.initialize(model, optimizer, settings(2, bucket={"bytes": 400}))
    train(engine, range(1))
    context = engine._context
    wide = dict.fromkeys(context.original_dtypes, torch.float64)
    with Flats() as flats:
        values = FullValues(engine._runtime, wide)
    assert all(values(name).dtype == torch.float64 for name in wide)
    with Flats() as others:
        assert context.optimizer.gather(context.transport, context.control, Room("here", PLENTY)).states
    told = flats.alive, others.alive, len(engine.buckets)
    engine.destroy()
    return told


def test_one_bucket_at_a_time_beside_the_result(pools: Pools) -> None:
    """Of the parameters and of the state: what one bucket was gathered in is gone before the next is made."""
    for parameters, states, buckets in pools(2).run(one_bucket_at_a_time):
        assert len(parameters) == buckets > 3 and set(parameters) == {0}, parameters
        assert len(states) > 6 and set(states) == {0}, states


# ---------------------------------------------------------------------- taken over from another memory
@pytest.mark.parametrize(("weights", "states"), [("meta", "cpu"), ("cpu", "meta"), ("cpu", "cpu")])
def test_a_counter_lies_where_the_optimizer_wants_it(weights: str, states: str) -> None:
    """Wherever it was: on the device for a fused one, in host memory for others, which do not synchronise then."""
    for options, wanted in (({"fused": True}, True), ({}, False)):
        model = nn.Linear(3, 3, bias=False).to("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model = model.to(weights)
        (parameter,) = optimizer.param_groups[0]["params"] = list(model.parameters())
        like = torch.zeros(3, 3, device=states)
        step = torch.zeros((), device="cpu")
        optimizer.state[parameter].update(step=step, exp_avg=like, exp_avg_sq=like)
        described = describe(optimizer, {"weight": parameter})
        assert described is not None
        held = described.states["weight"]
        assert held["step"].on_device == wanted and held["exp_avg"].kind == "cut"
