"""What a rank tells the others about itself: `RankStatus` is a rank's line on the board, `StatusLine` its own one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import TypeAdapter

from zeroweave.ranks.board import Board


@dataclass(frozen=True)
class Failure:
    """An exception that left the engine on one rank; `final` if the others cannot share it.

    `epoch` counts the failures that all ranks have survived together before; `count` the collectives issued,
    `operations` those of the control group, `others` those begun in the program's own process groups, by name.
    `missed`: a rank did not come before the deadline. `interrupted`: by Ctrl-C, which comes at any point of a call.
    """

    epoch: int
    step: int
    place: str
    count: int
    error: str
    final: bool = False
    operations: int = 0
    missed: bool = False
    interrupted: bool = False
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def spot(self) -> tuple[int, str, int, int]:
        """Where it happened. The counts belong to it: after different collectives ranks cannot go on."""
        return self.step, self.place, self.count, self.operations


@dataclass(frozen=True)
class RankStatus:
    """A rank's line on the board.

    `issued`, `trail`, `latest`: how many collectives it had issued when it last showed that it lives, their hash,
    and the last of them in words. `call`: where it was then, "in forward" or "after step".
    `asks`: it wants to know what the others remember of their collectives.
    `step`, `count`: the last step whose collectives this rank has all issued (-1: none) and their number
    since the beginning; `steps`: how many such steps there have been, since a run may go back to an earlier `step`;
    `meetings`: how often it has come to meet the others in a call, the last time after `count`;
    once it has `left`, the number of all it will ever issue. `left`: how, "" while it is
    there. `parted`: it knows that rank 0 has left. `process`: see `process.own`.
    """

    beat: int = 0
    issued: int = 0
    trail: int | None = None
    latest: str = ""
    call: str = ""
    asks: bool = False
    step: int = -1
    count: int = 0
    steps: int = 0
    meetings: int = 0
    left: str = ""
    parted: bool = False
    process: str = ""
    failure: Failure | None = None

    def dump(self) -> str:
        return _STATUS.dump_json(self).decode()

    @classmethod
    def parse(cls, text: str) -> RankStatus:
        return _STATUS.validate_json(text) if text else cls()


_STATUS: Final = TypeAdapter(RankStatus)


class StatusLine:
    """This rank's line, written by both threads. `epoch`: failures that all ranks have survived together."""

    def __init__(self, board: Board) -> None:
        self.board, self.epoch, self.status = board, 0, RankStatus()
        self._lock = threading.Lock()

    def post(self, **changes: Any) -> None:
        with self._lock:
            self.status = replace(self.status, **changes)
            self.board.post("status", self.status.dump())

    def finish(self, step: int, count: int) -> None:
        """This rank has issued all collectives of a step, `count` since the beginning."""
        self.post(step=step, count=count, steps=self.status.steps + 1)

    def survive(self) -> None:
        """All ranks have failed alike, and go on."""
        self.epoch += 1

    @property
    def failing(self) -> bool:
        """Whether this rank has failed itself: its own thread then decides what happens to it."""
        failure = self.status.failure
        return failure is not None and failure.epoch == self.epoch


def read(board: Board) -> list[RankStatus]:
    """Every rank's status, in rank order."""
    return [RankStatus.parse(text) for text in board.read("status")]


def question_of(failure: Failure) -> str:
    """The board's question whether all ranks share the failures of this epoch: "alike", or it is fatal."""
    return f"failure {failure.epoch}"


def tell(rank: int, failure: Failure) -> str:
    return f"rank {rank} failed in {failure.place} at step {failure.step}: {failure.error}"


def describe(error: BaseException, limit: int = 2000) -> str:
    """The type and the text of an exception."""
    return f"{type(error).__name__}: {error}"[:limit]
