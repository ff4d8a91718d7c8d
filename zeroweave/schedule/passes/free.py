"""Free: the optimizer step does not share memory with activations that nothing can use any more."""

from __future__ import annotations

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Free, Update


def free(schedule: Schedule) -> Schedule:
    """Put a ``Free`` before the first ``Update``, where ``facts.free`` asks for it.

    Before:  Settle head · Update head · Update blocks.0 …
    After:   Settle head · Free · Update head · Update blocks.0 …

    A backward uses up what its forward saved for it. What is left then belongs to graphs that were retained or
    never walked, and from the first update on they can give no gradient any more: their parameters change.
    """
    if not schedule.facts.free or Free() in schedule.instructions:
        return schedule
    first = next((n for n, i in enumerate(schedule.instructions) if isinstance(i, Update)), None)
    return schedule if first is None else schedule.rearranged({first: [Free()]})
