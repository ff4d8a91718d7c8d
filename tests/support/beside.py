"""A stream beside the computation in graphs on the CPU: what a replay executes there comes as late as it may.

A capture writes down which operations were issued on the stream, and when the main one waits for them. A replay
executes these operations at that wait, and not before. Memory is poisoned as soon as nobody on the host refers to it:
what the main stream has made at that place, and what the other one has made behind the operations that it had then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from tests.support import graphs
from tests.support.graphs import POISON, Call, Device, InFlat, Tape, execute

Stream = Literal["main", "side"]


@dataclass
class Beside:
    """What the test sees of it. `operations`: those of the side stream, in all captures."""

    operations: int = 0
    tape: LateTape | None = None
    """of the capture that is open"""
    stream: Stream = "main"


@dataclass(frozen=True)
class _Issued:
    call: Call
    stream: Stream


@dataclass(frozen=True)
class _Joined:
    count: int
    """The main stream waits for so many operations of the other."""


@dataclass(frozen=True)
class _Freed:
    storage: int
    stream: Stream
    """on which it was made"""


class Side:
    """In the place of `comm.pending.Side`."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def __enter__(self) -> None:
        assert self._beside.stream == "main", "entered inside of itself"
        self._beside.stream = "side"

    def __exit__(self, *error: object) -> None:
        self._beside.stream = "main"

    def pending(self, *alive: torch.Tensor) -> _Pending:
        tape = self._beside.tape
        return _Pending(tape, 0 if tape is None else tape.beside, list(alive))


class _Pending:
    def __init__(self, tape: LateTape | None, count: int, alive: list[torch.Tensor]) -> None:
        self._tape, self._count, self._alive = tape, count, alive

    def wait(self) -> None:
        if self._tape is not None:
            self._tape.joined(self._count)
        self._alive.clear()


class LateTape(Tape):
    """Operations of two streams."""

    def __init__(self, device: Device, beside: Beside) -> None:
        super().__init__(device)
        self._state = beside
        self._events: list[_Issued | _Joined | _Freed] = []
        self._made_on: dict[int, Stream] = {}
        self._in_use = self._pool.used()
        self.beside = 0
        """operations of the side stream"""

    def __enter__(self) -> LateTape:
        self._state.tape = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        self._state.tape = None
        self._note_freed()
        return super().__exit__(*error)

    def joined(self, count: int) -> None:
        self._events.append(_Joined(count))
        self._note_freed()

    def _note_freed(self) -> None:
        now = self._pool.used()
        self._events += [_Freed(key, self._made_on.get(key, "main")) for key in self._in_use - now]
        self._in_use = now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_freed()
        calls, known, stream = len(self._calls), set(self._pool._made), self._state.stream
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._made_on |= dict.fromkeys(set(self._pool._made) - known, stream)
        for call in self._calls[calls:]:
            self._events.append(_Issued(call, stream))
            if stream == "side":
                flats = [each for each in tree_leaves(call[1:]) if isinstance(each, InFlat)]
                assert not flats, f"{call[0]} on the side stream uses a flat, which the main one may free"
                self.beside += 1
                self._state.operations += 1
        self._in_use = self._in_use | self._pool.used()
        return out

    @torch.no_grad()
    def replay(self) -> None:
        self._pool.check_found(self._found)
        self._pool.poison(but=self._before)
        waiting, executed = deque[_Issued | _Freed](), 0
        with self._device.flats_of_graphs(self._flats_after):
            for event in self._events:
                match event:
                    case _Issued(call, "main"):
                        execute(call)
                    case _Freed(storage, "main"):
                        self._poison(storage)
                    case _Joined(count):
                        while waiting and (executed < count or isinstance(waiting[0], _Freed)):
                            executed += self._come(waiting.popleft())
                    case _:
                        waiting.append(event)
            assert not any(isinstance(each, _Issued) for each in waiting), "the capture ends with unjoined work"
        self._pool.poison(but=self._after)

    def _come(self, event: _Issued | _Freed) -> int:
        """How many operations that is."""
        if isinstance(event, _Freed):
            self._poison(event.storage)
            return 0
        execute(event.call)
        return 1

    def _poison(self, key: int) -> None:
        if (storage := self._pool._made.get(key)) is not None:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)


@contextmanager
def late() -> Iterator[Beside]:
    """Inside, engines that capture on the CPU have such a stream."""
    beside = Beside()
    with ExitStack() as stack:
        stack.enter_context(patch.object(graphs, "Tape", lambda device: LateTape(device, beside)))
        stack.enter_context(patch("zeroweave.engine.graphs.graphs.side_of", lambda _: Side(beside)))
        yield beside
