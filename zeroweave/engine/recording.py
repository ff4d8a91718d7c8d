"""What `engine.record()` has of the steps inside it."""

from __future__ import annotations

from collections.abc import Callable

from zeroweave.errors import EngineError
from zeroweave.schedule import Costs, Graph, Operations, Schedule, Step, costs_of


class Recording:
    """What `engine.record()` yields: empty inside the block, filled at its end."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._operations: Operations | None = None

    @property
    def operations(self) -> Operations:
        """Every collective of the last recorded step, in order. EngineError if no step was recorded."""
        if self._operations is None:
            raise EngineError(
                "[ZW704] no step was recorded: record() must surround whole steps that follow a schedule, which the "
                "first step and one that departs do not"
            )
        return self._operations

    @property
    def graph(self) -> Graph:
        """The dependencies between the instructions of the recorded schedule."""
        return self.operations.graph

    def finish(self, room: int, agree: Callable[[Schedule | None, Costs | None], Costs | None]) -> None:
        """Called at the end of the block, on all ranks; the costs are those that `agree` finds, if it finds any."""
        schedule = self.steps[-1].schedule if self.steps else None
        steps = tuple(step for step in self.steps if step.schedule is schedule)
        mine = costs_of(steps, room) if steps else None
        agreed = agree(schedule, mine)
        if mine is not None:
            self._operations = Operations(steps, mine if agreed is None else agreed, agreed is not None)
