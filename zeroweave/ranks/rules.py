"""When ranks must be ended, by what the coordinator knows of each. Every rule costs O(ranks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Final

from zeroweave.ranks.status import Brought, Member, names, nodes

ALIKE_SECONDS: Final = 10.0
"""Seconds that a rank gets to fail alike while it is in a collective of the program's own process group.

The failed rank had not begun that collective, so a rank that waits in it probably never returns. A rank that waits
anywhere else has until the deadline.
"""
SILENCE: Final = 60
"""Looks without a sign of life after which a late rank counts as missing.

A rank that lives counts as missing only after a new status. It may have reached the collective and been unable to say
so, because a compiler held Python's lock.
"""


def alike(members: Sequence[Member], now: float, deadline: float) -> bool | None:
    """True if all ranks failed in the same place; None while that is open.

    Then no rank waits for another one, and training can go on. Else those that did not fail must be ended.
    """
    failed = [member for member in members if member.failure is not None]
    failures = [member.failure for member in failed if member.failure is not None]
    if not failures:
        return None
    if any(failure.final or failure.spot != failures[0].spot for failure in failures):
        return False
    if len(failures) == len(members):
        # Nobody knows how far an interrupted call came: one rank may have written, or issued, what another did not.
        # Asked last, so that each of them gets the time to fail by itself.
        return not any(failure.interrupted for failure in failures)
    first, waited = failures[0], now - min(member.failed for member in failed)
    for member in members:
        if member.failure is None:
            elsewhere = any(member.status.begun.get(group, 0) > count for group, count in first.begun.items())
            patience = min(ALIKE_SECONDS, deadline) if elsewhere else deadline
            # It can no longer fail alike once it has begun what the failed one had not.
            gone_on = member.status.issued > first.count or member.operations > first.operations
            if not member.there or gone_on or waited >= patience:
                return False
    return None


def waits_in_vain(members: Sequence[Member], brought: Mapping[int, Brought]) -> str | None:
    """Which rank has issued a collective to which another one will not come, and why; None where there is none.

    The other one has left, or waits for it in the operation of which these are `brought`.
    """
    ends = [
        (m.status.issued, f"rank {rank} issues no collective after its {m.status.issued}: {m.status.left}")
        for rank, m in enumerate(members)
        if m.status.left
    ]
    ends += [
        (there.issued, f"rank {rank} is at '{there.label}' after {there.issued} collectives")
        for rank, there in brought.items()
        if there.issued is not None
    ]
    count, why = min(ends, default=(0, ""))
    for rank, member in enumerate(members):
        mine = member.status
        if why and mine.issued > count and not mine.left and rank not in brought:
            here = f"{mine.here and ', '}{mine.here}"
            return f"{why}; rank {rank} has issued {mine.issued} and is in step {mine.at}{here}"
    return None


def late(members: Sequence[Member], now: float, deadline: float, stopped: Set[int] = frozenset()) -> str | None:
    """Which ranks have not come to a collective before the deadline of one that waits there; None where there are none.

    Such a rank has issued fewer collectives, and no new one during the whole wait. Its status may be out of date, so it
    counts only if it has sent a status after the deadline, has been silent for `SILENCE` looks, or its process is gone
    or `stopped`. A stopped rank is late even if it has come, because it may be stopped in the middle of the collective.
    A rank that no other one waits for may be silent for as long as it likes.
    """
    there = {rank: member for rank, member in enumerate(members) if not member.status.left}
    least = min((member.status.issued for member in there.values()), default=0)
    late_ones = stopped or {rank for rank, member in there.items() if member.status.issued == least}
    missing = {rank: member for rank, member in there.items() if rank in late_ones}
    for rank, member in there.items():
        wait = member.status.waits
        if wait is None or rank in missing or not (stopped or least < wait.number):
            continue
        begin = max(member.heard - wait.seconds, *(each.changed for each in missing.values()))
        if now - begin <= deadline:
            continue
        if stopped or all(m.gone or m.looks >= SILENCE or m.heard > begin + deadline for m in missing.values()):
            on = nodes(members)
            told = names({each: f"{on[each]} ({_of(missing[each], each in stopped)})" for each in missing})
            found = (
                f"{told} did not come to collective {wait.number} ('{wait.text}') within the deadline of {deadline:g} s"
            )
            return f"{found}; rank {rank} waits for it {wait.where}" if wait.where else found
    return None


def _of(member: Member, stopped: bool) -> str:
    status = member.status
    lasting = f", no sign of life for {member.looks} s" if member.looks >= SILENCE else ""
    lasting = ", its process has gone" if member.gone else ", its process is stopped" if stopped else lasting
    return f"{status.call or 'before its first call'}, after {status.issued} collectives{lasting}"
