"""What the ranks of an engine compare, and decide together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import xxhash

from zeroweave.comm.wrappers import Wire
from zeroweave.engine.guard import Progress
from zeroweave.errors import AgreementError
from zeroweave.optim.options import Options, difference, packed
from zeroweave.ranks.control import Agreement, Control, Decision, Diverged, decide
from zeroweave.ranks.differ import MODULES, first_difference
from zeroweave.ranks.signals import Notes
from zeroweave.schedule import Costs, Schedule

SCHEDULE_SECONDS: Final = 30.0
"""How long a rank waits for the others to make the same schedule, where `deadline_seconds` is not less."""


@dataclass(frozen=True)
class Found:
    """What the ranks of an engine know of a step together, a byte each: 1 where it holds for any rank.

    `had_gradient`: see `Gradients.had_gradient`; `late`: the buckets with gradients that no reduction has had;
    `viewed`: those of which user code still has views.
    """

    decision: Decision
    had_gradient: bytes
    late: bytes
    viewed: bytes


class Agreements:
    """What the ranks of one engine compare, and decide together.

    While steps are only tried out (`Wire.skips`), each decides as if the others had said what it says. Each step
    they tell each other what was noted.
    """

    def __init__(self, control: Control, transport: Wire, progress: Progress, notes: Notes) -> None:
        self._control, self._transport = control, transport
        self._progress, self.notes = progress, notes
        self._backwards = self._changes = self._agreed = 0

    def step(
        self,
        had_gradient: bytes,
        late: bytes,
        viewed: bytes,
        candidate: Schedule,
        options: Callable[[], Options],
        nonfinite: Callable[[], bool] = lambda: False,
    ) -> Found:
        """The agreement of an optimizer step; see `ranks.control.Agreement`.

        `options()`: those that this rank would update by. `nonfinite()` may wait for collectives. Raises
        `AgreementError` where the ranks would update by different options, or would follow different schedules although
        they compute the same.
        """
        self._backwards = 0
        step, count = self._progress()
        digest, found = self._progress.ledger.hash, nonfinite()
        flags = had_gradient + late + viewed
        mine = Agreement(step, count, digest, flags, candidate.fingerprint, candidate.shape, found)
        if self._transport.skips:
            decision = decide({0: mine})
        else:
            given = options()
            mine = replace(mine, flags=flags + self.notes.flags, options=xxhash.xxh3_64_intdigest(packed(given)))
            decision = self._agree(mine, "agreement")
            if decision.options_differ:
                self._compare(given)
        if decision.differ:
            self.schedule(candidate)
        left = iter(decision.flags)
        told = [bytes(islice(left, len(own))) for own in (had_gradient, late, viewed)]
        if not self._transport.skips:
            self.notes.agree(bytes(left))
        return Found(decision, *told)

    def union(self, what: str, flags: bytes) -> bytes:
        """For each byte, whether it is 1 on any rank; this rank's own where others have other things. Collective."""
        if self._transport.skips:
            return flags
        ranks = self._control.all_gather_bytes(flags, f"{what} of step {self._progress.step}")
        if any(len(theirs) != len(flags) for theirs in ranks):
            return flags  # the agreement of the step says what differs
        return bytes(map(max, zip(*ranks, strict=True)))

    def backward(self) -> None:
        """Raises `AgreementError` unless all ranks have issued the same collectives up to this end of a backward."""
        if self._transport.skips:
            return
        self._backwards += 1
        step, count = self._progress()
        place = f"the check after backward {self._backwards}"
        try:
            self._agree(Agreement(step, count, self._progress.ledger.hash, b""), place)
        except AgreementError as error:
            error.add_note(f"found in {place} of step {step}")
            raise

    def _agree(self, mine: Agreement, place: str) -> Decision:
        """As `Control.agree`; an error about different collectives says which one was the first."""
        try:
            decision = self._control.agree(mine, place)
        except Diverged as error:
            found = self._first_difference(self._progress.ledger.texts(self._agreed), error.rank)
            if self._progress.ledger.gathers_on_entry:
                found = f"{found}; {MODULES}"
            raise AgreementError(f"{error}. Behind the {self._agreed} on which they agreed: {found}") from None
        self._agreed = mine.count
        return decision

    def _compare(self, mine: Options) -> None:
        """AgreementError on all ranks unless all would update alike. Collective."""
        step, _ = self._progress()
        ranks: list[Options] = self._control.all_gather_object(mine, f"the options of step {step}")
        for rank, theirs in enumerate(ranks):
            if (found := difference(ranks[0], theirs)) is not None:
                name, *values = found
                here, there = (each[0] if len(each) == 1 else [*each] for each in values)
                raise AgreementError(
                    f"[ZW505] step {step}: the ranks would update by different options; nothing has been written. "
                    f"{name} is {here} on rank 0, {there} on rank {rank}. Give all ranks the same; what a scheduler "
                    "decides by, such as a loss, has to be averaged over the ranks before"
                )

    def costs(self, schedule: Schedule | None, mine: Costs | None) -> Costs | None:
        """The costs that all ranks decide by; None where a rank has none, or computes other things. Collective.

        `schedule`: what they were measured on.
        """
        if self._transport.skips:
            return None
        step, _ = self._progress()
        here = None if schedule is None else schedule.shape
        ranks = self._control.all_gather_object((here, mine), f"the costs at step {step}")
        costs = [theirs for shape, theirs in ranks if theirs is not None and shape == here]
        return Costs.merge(costs) if len(costs) == len(ranks) else None

    def memory(self, peak: int, room: int) -> tuple[int, int]:
        """Bytes: the most that were in use on any rank, and the least room of any. Collective."""
        step, _ = self._progress()
        peaks, rooms = zip(*self._control.all_gather_object((peak, room), f"the memory at step {step}"), strict=True)
        return max(peaks), min(rooms)

    def schedule(self, schedule: Schedule) -> None:
        """Raises `AgreementError` on all ranks unless all would follow this schedule. Collective."""
        self._changes += 1
        mine, label = schedule.fingerprint.to_bytes(8, "little"), f"change {self._changes} of the schedule"
        seconds = min(SCHEDULE_SECONDS, self._control.deadline_seconds)
        ranks = self._control.all_gather_bytes(mine, label, seconds)
        other = next((rank for rank, theirs in enumerate(ranks) if theirs != ranks[0]), 0)
        if other:
            found = self._first_difference(schedule.words(), other)
            raise AgreementError(f"the ranks made different schedules: {found}")

    def _first_difference(self, mine: Sequence[str], other: int) -> str:
        """Where the lists of rank 0 and of rank `other` begin to differ, in words. Collective."""
        told = mine if self._control.rank in (0, other) else ()
        ranks = self._control.all_gather_object(told, f"where rank {other} differs")
        return first_difference(ranks[0], ranks[other], 0, other)
