"""The log on the terminal of rank 0: a bar that moves with the steps, or plain lines where stderr is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

_REDRAWN: float = 0.1
"""Seconds between two drawings of the bar, at least."""


class _Told(ProgressColumn):
    """The figures, cut where the terminal ends: the columns before them keep their room."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class Terminal:
    """Shows the figures that were told last, and each event as a line above. `steps`: of the whole run, None: unknown.

    What the program prints meanwhile appears above the bar.
    """

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

    def tell(self, kind: str, values: dict[str, Any]) -> None:
        """See `sinks.Sink`."""
        if kind == "step" and self._bar is not None:
            self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=values["step"])
            if (now := time.monotonic()) - self._drawn >= _REDRAWN:
                self._drawn = now
                self._bar.refresh()
        elif kind == "figures" and self._bar is not None:
            self._bar.update(self._bar.task_ids[0], figures=", ".join(words(values)), refresh=True)
        elif kind == "figures":
            self._print(f"step {values['step']}: {', '.join(words(values))}")
        elif kind == "event":
            where = f", rank {values['rank']}" if values["rank"] else ""
            self._print(f"step {values['step']}{where}: {values['event']}: {values['reason']}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def words(figures: dict[str, Any]) -> Iterator[str]:
    """What a line has room for."""
    if (loss := figures["loss"]) is not None:
        yield f"loss {loss:.4f}"
    if (rate := figures["tokens_per_second"]) is not None:
        yield f"{rate:,.0f} tokens/s"
    yield f"{1000 * figures['seconds']:.1f} ms a step"
    if (memory := figures["memory"]) is not None:
        yield f"{memory / (1 << 30):.1f} GiB"
    if (exposed := figures["exposed"]) is not None:
        yield f"{1000 * exposed:.1f} ms of it exposed communication"
    if skipped := figures["skipped"]:
        yield f"{skipped} skipped"
