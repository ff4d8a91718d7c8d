"""Whether graphs do what the window did that they were captured from, bit by bit.

Where the replay left what the window had left, they do. Where it did not, the window runs once more as ever, is
replayed again, and so on: the backward of attention, for one, adds up in an order that is another one now and then.
Which orders come, and how often, is a matter of what else the device does just then: kernels lie closer together in a
replay than in a run, so that most replays may leave the same bits, and most runs other ones.

The graphs are used once each tensor agrees. Some replay left the bits that some run left. Or replays differ from each
other: then some replay is as near to some run as that lets expect, and runs and replays lie among each other, looked at
from many sides. Where runs are alike, all replays are as near to them as runs of the same window are to each other in
half of the tensors in which they differ: what computes the same each time, and not in replays, is no noise. What runs
differ by is no measure where all replays are alike: the host may count runs, and compute with the number.

And no replay is astray. One is that lies far from all runs, by what they differ from each other and by the tensor's own
size, or that is not finite where they are. Of integers none is: such as the remainders of masters, of which a little
noise leaves nothing.

They are refused for tensors that do not agree in the end, and as soon as replays are astray more often than chance
would have it. Where runs differ from each other, or replays do, another trial may find otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, starmap
from statistics import median
from typing import Final, NamedTuple

from zeroweave.engine.graphs.contents import PARTS, Print
from zeroweave.engine.graphs.parts import CapturedWindow
from zeroweave.engine.graphs.trial import Trial

_ROUNDS: Final = 14
"""So often a window is replayed and run again at most. If each order of as many runs and replays were equally likely,
all runs would lie on one side of all replays less than once in ten million times."""
_STRAYS: Final = 1e-3
"""With such a chance replays are astray although their graph is right."""
_FEWEST: Final = 3
"""So many runs and replays at least tell what they differ by."""
_WIDE, _SMALL = 8.0, 2.0**-5
"""A replay is astray beyond so many times what runs differ by, and beyond such a share of the tensor's norm."""
_NEAR: Final = 2.0
"""A replay is near a run within so many times what replays differ by, or what runs do elsewhere."""
_OFTEN: Final = 0.5
"""Runs and replays lie among each other where they do so in this share of the parts in which chance has them do so."""
_NOTHING: Final = Print(-1, (math.inf,) * PARTS, math.inf)

Place = tuple[str, int]
Sketch = tuple[float, ...]
Prints = Mapping[Place, Print]


class Verdict(NamedTuple):
    why: str | None = None
    """why the graphs of a window must not be used; None if they may"""
    lasts: bool = False
    """would another trial end like this one? It might not where runs differ from each other, or replays do"""


def compared(trial: Trial, window: CapturedWindow, tell: Callable[[str | None], str | None]) -> Verdict:
    """What replays of a window's graphs leave, and runs of it. `tell(why)`: any rank's reason. Collective.

    The engine is left as a run as ever leaves it.
    """
    capturer = trial.bench.capturer
    random = capturer.random
    runs, replays = [trial.left(trial.results)], list[Prints]()
    first = next((place for place in runs[0] if place[0].startswith("the result of")), None)
    verdict = Verdict()
    for index in range(_ROUNDS):
        trial.rewind()
        replays.append(trial.left(trial.replayed(window)))
        agree = tell(_named(_apart(runs, replays)) or None) is None
        if agree and index == 0:
            break
        trial.rewind()
        runs.append(trial.left(trial.rerun()))
        if agree:
            break
        last, mine, lasts = index == _ROUNDS - 1, None, False
        if first is not None and runs[0][first] != runs[-1].get(first):
            lasts, mine = True, "the model does not compute the same twice, so that its graph cannot be compared"
        else:
            apart = _apart(runs, replays)
            astray = [place for place in apart if _are_astray(_of(place, runs), _of(place, replays))]
            if other := apart if last else astray:
                lasts = bool(astray) or not (_differ(runs) or _differ(replays))
                mine = f"its replay differs in {_named(other)}"
        if (why := tell(mine)) is not None:
            verdict = Verdict(why, tell(mine if lasts else None) is not None)
            break
    capturer.resume_random(random)
    return verdict


def _named(places: Iterable[Place]) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in places))


def _apart(runs: Sequence[Prints], replays: Sequence[Prints]) -> list[Place]:
    """Where runs and replays do not agree so far."""
    places, noise = {place for each in (*runs, *replays) for place in each}, _noise(runs)
    return sorted(place for place in places if not _agree(_of(place, runs), _of(place, replays), noise))


def _differ(windows: Sequence[Prints]) -> bool:
    """Do they anywhere?"""
    first, *others = ({place: each.digest for place, each in window.items()} for window in windows)
    return any(digests != first for digests in others)


def _noise(runs: Sequence[Prints]) -> float:
    """What runs differ by in the tensors in which they do, as a share of the norm: the median of these.

    Not the largest: gradients that are zero in theory are nothing but noise.
    """
    prints = [_of(place, runs) for place in runs[0]]
    shares = [_spread(_values(each)) / each[0].norm for each in prints if 0 < each[0].norm < math.inf]
    return median([share for share in shares if share] or [0.0])


def _of(place: Place, windows: Sequence[Prints]) -> list[Print]:
    """What each left there; a window that left nothing there is one more value."""
    return [window.get(place, _NOTHING) for window in windows]


def _agree(runs: Sequence[Print], replays: Sequence[Print], noise: float) -> bool:
    """`noise`: see `_noise`."""
    if _strays(runs, replays):
        return False
    if not {each.digest for each in runs}.isdisjoint(each.digest for each in replays):
        return True
    return len(runs) >= _FEWEST and _may_be_noise(runs, replays, noise)


def _may_be_noise(runs: Sequence[Print], replays: Sequence[Print], noise: float) -> bool:
    """Do they differ from each other as replays differ among themselves?"""
    ours, theirs = _values(runs), _values(replays)
    vary, others_vary = (len({each.digest for each in prints}) > 1 for prints in (runs, replays))
    if not ours or len(theirs) < 2 or len(ours) + len(theirs) <= _FEWEST:
        # Of what is not finite no distance tells.
        endless = all(any(not each.finite for each in prints) for prints in (runs, replays))
        return endless and vary and others_vary
    if not vary and not max(math.dist(ours[0], each) for each in theirs) <= _NEAR * noise * runs[0].norm < math.inf:
        return False
    between = min(math.dist(run, replay) for run in ours for replay in theirs)
    return between <= _NEAR * _spread(theirs) and _lie_among(ours, theirs)


def _lie_among(runs: Sequence[Sketch], replays: Sequence[Sketch]) -> bool:
    """Does any lie between others of the other kind, in many of the parts in which they differ?

    Noise is another one in each part. What a graph computes beside it, such as a multiple of the right gradient, lies
    apart in all of them. Of n runs and m replays, if each order is equally likely, all of one kind are below all of
    the other with 2 / C(n + m, n).
    """
    ranges = [
        (min(ours), max(ours), min(theirs), max(theirs))
        for ours, theirs in zip(zip(*runs, strict=True), zip(*replays, strict=True), strict=True)
        if len({*ours, *theirs}) > 1
    ]
    among = sum(low <= most and least <= high for low, high, least, most in ranges)
    return among >= _OFTEN * (1 - 2 / math.comb(len(runs) + len(replays), len(runs))) * len(ranges)


def _values(prints: Sequence[Print]) -> list[Sketch]:
    """The sketches of those that are finite, each once."""
    return list({each.digest: each.sketch for each in prints if each.finite}.values())


def _spread(sketches: Sequence[Sketch]) -> float:
    """The largest distance between two of them."""
    return max(starmap(math.dist, combinations(sketches, 2)), default=0.0)


def _strays(runs: Sequence[Print], replays: Sequence[Print]) -> int:
    """How many replays are astray."""
    known = {each.digest for each in runs}
    others = [each for each in replays if each.digest not in known]
    finite = [each for each in runs if each.finite]
    if not others or not finite:
        return sum(each.finite for each in others)
    sketches, whole = _values(runs), len(finite) == len(runs)
    near = max(_WIDE * _spread(sketches), _SMALL * max(each.norm for each in finite))
    return sum(min(math.dist(each.sketch, one) for one in sketches) > near if each.finite else whole for each in others)


def _are_astray(runs: Sequence[Print], replays: Sequence[Print]) -> bool:
    """Is that no chance? If each order of n and m is equally likely, k that are astray are all replays with
    C(m, k) / C(n + m, k).
    """
    n, m, strays = len(runs), len(replays), _strays(runs, replays)
    return strays > 0 and math.comb(m, strays) / math.comb(n + m, strays) < _STRAYS
