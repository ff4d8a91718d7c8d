"""The log on the terminal of rank 0: a bar that moves with the steps, or plain lines where stderr is none."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from zeroweave.engine.logs.sinks import Figures, Happened, Sink

_REDRAWN: float = 0.1
"""Seconds between two drawings of the bar, at least."""


class _Told(ProgressColumn):
    """The figures, cut where the terminal ends: the columns before them keep their room."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class Terminal(Sink):
    """Shows the figures that were told last, and each event as a line above. `steps`: of the whole run, None: unknown.

    What the program prints meanwhile appears above the bar.
    """

    name = "the terminal"

    def __init__(self, console: Console, steps: int | None) -> None:
        self._console, self._drawn = console, 0.0
        columns: list[ProgressColumn] = [TextColumn("step {task.completed:.0f}")]
        if steps is not None:
            left = TimeRemainingColumn(table_column=Column(no_wrap=True))
            columns = [TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=20), left]
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(*columns, _Told(), console=console, auto_refresh=False)
            self._bar.add_task("", total=steps, figures="")

    def step_ended(self, step: int) -> None:
        if self._bar is None:
            return
        self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step)
        if (now := time.monotonic()) - self._drawn >= _REDRAWN:
            self._drawn = now
            self._bar.refresh()

    def figures(self, figures: Figures) -> None:
        told = ", ".join(words(figures))
        if self._bar is None:
            self._print(f"step {figures.step}: {told}")
        else:
            self._bar.update(self._bar.task_ids[0], figures=told, refresh=True)

    def happened(self, happened: Happened) -> None:
        where = f", rank {happened.rank}" if happened.rank else ""
        self._print(f"step {happened.step}{where}: {happened.kind}: {happened.reason}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def words(figures: Figures) -> Iterator[str]:
    """What a line has room for."""
    if figures.loss is not None:
        yield f"loss {figures.loss:.4f}"
    if figures.tokens_per_second is not None:
        yield f"{figures.tokens_per_second:,.0f} tokens/s"
    yield f"{1000 * figures.seconds:.1f} ms a step"
    if figures.memory is not None:
        yield f"{figures.memory / (1 << 30):.1f} GiB"
    if figures.exposed is not None:
        yield f"{1000 * figures.exposed:.1f} ms of it exposed communication"
    if figures.skipped:
        yield f"{figures.skipped} skipped"
