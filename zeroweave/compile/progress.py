"""The time that compilation takes: its seconds by phase, and a line on the terminal while it lasts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from zeroweave.notices import on_stderr

NAMES = ("dynamo", "aot", "partition", "wait", "lower")


class Phases:
    """Seconds of each phase of compilation, exclusive: a phase inside another does not count for both.

    `dynamo`: capture of graphs and guards. `aot`: AOTAutograd's tracing of forward and backward. `partition`: the split
    into the two, Inductor's joint passes included. `wait`: for another rank of this machine that compiles the same
    graph. `lower`: from graphs to code. Others may be added by their name.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(NAMES, 0.0)
        self.total = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time inside for `name`, less that of phases inside."""
        began, inside = time.perf_counter(), self.total
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began - (self.total - inside))

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.total += seconds


class Announcer:
    """One line on stderr for each group of equal regions while it is compiled, with the seconds that this takes.

    A minute of silence would look like a hang.

    `speaks`: False if the line would not be read. `first`: True until the first step is over. Afterwards nothing is
    printed: the program has its own output then. The code that compiles enters `phase` outside of all code that Dynamo
    traces.
    """

    def __init__(self, speaks: bool, first: Callable[[], bool]) -> None:
        self.speaks, self._first = speaks, first
        self._names: dict[Hashable, list[str]] = {}
        self._begun: set[Hashable] = set()
        self._inside = False

    @classmethod
    def on_terminal(cls, rank: int, first: Callable[[], bool]) -> Announcer:
        """Speaks on rank 0, where stderr is a terminal and ZEROWEAVE_QUIET is not 1."""
        quiet = os.environ.get("ZEROWEAVE_QUIET", "") not in ("", "0")
        return cls(rank == 0 and not quiet and sys.stderr.isatty(), first)

    def expect(self, key: Hashable, name: str) -> None:
        """A region of this name will be compiled with all others of this key."""
        self._names.setdefault(key, []).append(name)

    @contextmanager
    def phase(self, key: Hashable) -> Iterator[None]:
        """Inside, the regions of this key are compiled for the first time; any other time nothing happens."""
        if key in self._begun:
            yield
            return
        self._begun.add(key)
        with self._line(f"{pattern(self._names.get(key, ['']))} ({len(self._begun)} of {len(self._names)})"):
            yield

    @contextmanager
    def graph(self, name: str, kind: str) -> Iterator[None]:
        """Inside, a graph of the region `name` is compiled: its backward, when that is first needed, or one more.

        Nothing happens inside `phase`, which has said what there is to say.
        """
        name = name or "the model"
        with self._line(f"the backward of {name}" if kind == "backward" else f"{name} once more, for other inputs"):
            yield

    @contextmanager
    def _line(self, what: str) -> Iterator[None]:
        if not self.speaks or self._inside or not self._first():
            yield
            return
        from rich.live import Live
        from rich.text import Text

        began = time.perf_counter()
        self._inside = True
        try:
            with Live(
                get_renderable=lambda: Text(f"zeroweave: compiling {what}, {time.perf_counter() - began:.0f} s"),
                console=on_stderr(),
                refresh_per_second=1,
                redirect_stdout=False,
                redirect_stderr=False,
            ):
                yield
        finally:
            self._inside = False


def pattern(names: Sequence[str]) -> str:
    """One name for several: `layers.*` for `layers.0` and `layers.1`; "" is the whole model."""
    if len(names) == 1:
        return names[0] or "the model"
    parts = [name.split(".") for name in names]
    if len({len(each) for each in parts}) > 1:
        return f"{names[0] or 'the model'} and {len(names) - 1} more"
    return ".".join(each[0] if len(set(each)) == 1 else "*" for each in zip(*parts, strict=True))
