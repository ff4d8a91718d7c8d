"""The passes of a schedule, in the order in which they run.

A pass is a pure function ``Schedule -> Schedule``. It adds, drops or moves communication only: the sequence of
``Run``, ``End`` and ``Reduce`` belongs to the record. It changes nothing where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.passes.before_update import free, stage
from zeroweave.schedule.passes.keep import insert, keep
from zeroweave.schedule.passes.offload import offload
from zeroweave.schedule.passes.prefetch import prefetch
from zeroweave.schedule.passes.settle import settle

Pass: TypeAlias = Callable[[Schedule], Schedule]

# offload before keep, which fills the memory that it frees; insert once more after prefetch, which may carry a
# bucket's Unshard up to its own Reshard.
PASSES: Final[tuple[Pass, ...]] = (insert, offload, keep, prefetch, insert, settle, free, stage)

__all__ = ["PASSES", "Pass", "free", "insert", "keep", "offload", "prefetch", "settle", "stage"]
