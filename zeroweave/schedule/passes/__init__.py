"""The passes of a schedule, in the order in which they run.

A pass is a pure function ``Schedule -> Schedule`` in a file of its own. It adds, drops or moves communication
only: the sequence of ``Run``, ``End`` and ``Reduce`` belongs to the record. It changes nothing where it does
not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.passes.free import free
from zeroweave.schedule.passes.insert import insert
from zeroweave.schedule.passes.prefetch import prefetch

# insert once more at the end: prefetch may carry a bucket's Unshard up to its own Reshard.
PASSES: Final[tuple[Callable[[Schedule], Schedule], ...]] = (insert, prefetch, insert, free)

__all__ = ["PASSES", "free", "insert", "prefetch"]
