"""When ranks must be ended, by what the coordinator knows of each. Every rule costs O(ranks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zeroweave.ranks.status import Member, names, nodes

ALIKE_SECONDS: Final = 10.0
"""Seconds that a rank gets to fail alike while it is in a collective of the program's own process group.

That is one which the failed rank had not begun, so it probably cannot leave it. Any other rank gets until the deadline.
"""
SILENCE: Final = 60
"""Looks without a sign of life after which a late rank counts as missing.

A rank that lives counts as missing only after a new status. It may have reached the collective and been unable to say
so, because a compiler held Python's lock.
"""


def verdict(members: Sequence[Member], now: float, deadline: float) -> str | None:
    """Whether the ranks that failed share that: "alike", or why not; None while that is open.

    If all fail alike, nobody waits for anybody: training can go on. Else those that do not fail must be ended.
    """
    failed = [member for member in members if member.failure is not None]
    failures = [member.failure for member in failed if member.failure is not None]
    if not failures:
        return None
    if any(failure.final or failure.spot != failures[0].spot for failure in failures):
        return "different"
    if len(failures) == len(members):
        # Nobody knows how far an interrupted call came: one rank may have written, or issued, what another did not.
        # Asked last, so that each of them gets the time to fail by itself.
        return "interrupted" if any(failure.interrupted for failure in failures) else "alike"
    first, waited = failures[0], now - min(member.failed for member in failed)
    for member in members:
        if member.failure is None:
            elsewhere = any(member.status.begun.get(group, 0) > count for group, count in first.begun.items())
            patience = min(ALIKE_SECONDS, deadline) if elsewhere else deadline
            # It can no longer fail alike once it has begun what the failed one had not.
            gone_on = member.status.issued > first.count or member.operations > first.operations
            if not member.there or gone_on or waited >= patience:
                return "alone"
    return None


def waits_in_vain(members: Sequence[Member]) -> str | None:
    """Has a rank issued a collective to which another one will never come? It has left, or is farther with fewer."""
    statuses = [(rank, member.status) for rank, member in enumerate(members) if member.failure is None]
    if not statuses:
        return None
    left = [each for each in statuses if each[1].left]
    others = [
        min(left, key=lambda each: each[1].count, default=statuses[0]),
        max(statuses, key=lambda each: (each[1].meetings, -each[1].count)),
        max(statuses, key=lambda each: (each[1].steps, -each[1].count)),
    ]
    for rank, mine in statuses:
        for other, theirs in others:
            if mine.issued <= theirs.count or mine.left:
                continue
            if theirs.left:
                why = f"rank {other} issues no collective after its {theirs.count}: {theirs.left}"
            elif theirs.meetings > mine.meetings:
                why = f"rank {other} is {theirs.call} after {theirs.count} collectives"
            elif theirs.steps > mine.steps:
                why = f"rank {other} finished step {theirs.step} with {theirs.count} collectives"
            else:
                continue
            return (
                f"{why}; rank {rank} has issued {mine.issued} and is in step {mine.at}{mine.here and ', '}{mine.here}"
            )
    return None


def late(members: Sequence[Member], now: float, deadline: float) -> str | None:
    """Has a rank waited in a collective for longer than the deadline for ranks that have not come to it?

    They have issued fewer, and nothing more for as long. What they say is some time old when it is read: only what
    they have said after the deadline counts, or that they have said nothing for `SILENCE` looks, or that their
    processes are stopped or gone. A rank that nobody waits for may be silent for as long as it likes.
    """
    there = {rank: member for rank, member in enumerate(members) if not member.status.left}
    # One may have come, and be stopped in the middle of it.
    stopped = {rank: member for rank, member in there.items() if member.stopped}
    least = min((member.status.issued for member in there.values()), default=0)
    missing = stopped or {rank: member for rank, member in there.items() if member.status.issued == least}
    for rank, member in there.items():
        wait = member.status.waits
        if wait is None or rank in missing or not (stopped or least < wait.number):
            continue
        begin = max(member.heard - wait.seconds, *(each.changed for each in missing.values()))
        if now - begin <= deadline:
            continue
        if all(m.stopped or m.gone or m.looks >= SILENCE or m.heard > begin + deadline for m in missing.values()):
            on = nodes(members)
            told = names({each: f"{on[each]} ({_of(missing[each])})" for each in missing})
            found = (
                f"{told} did not come to collective {wait.number} ('{wait.text}') within the deadline of {deadline:g} s"
            )
            return f"{found}; rank {rank} waits for it {wait.where}" if wait.where else found
    return None


def _of(member: Member) -> str:
    status = member.status
    lasting = f", no sign of life for {member.looks} s" if member.looks >= SILENCE else ""
    lasting = ", its process has gone" if member.gone else ", its process is stopped" if member.stopped else lasting
    return f"{status.call or 'before its first call'}, after {status.issued} collectives{lasting}"
