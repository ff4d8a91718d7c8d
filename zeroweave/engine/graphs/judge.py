"""Whether graphs do what the window did that they were captured from, bit by bit.

Where the replay left what the window had left, they do. Where it did not, the window runs once more as ever, is
replayed again, and so on: the backward of attention, for one, adds up in an order that is another one now and then.
The graphs are used once each tensor agrees: some replay left the bits that some run left, or runs differ from each
other, and replays do, too, and some replay lies among the runs; and no replay is astray. One is that lies far from all
runs, by what they differ from each other and by the tensor's own size, or that is not finite where they are. Of
integers none is: such as the remainders of masters, of which a little noise leaves nothing.

They are refused for a tensor where chance brings that about less than once in ten million times: most runs left the
same bits and no replay did; most replays did and no run, as where the host counts runs and computes with the number;
or no replay lies among the runs. And where replays are astray in the end, or so many are that it takes no waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from zeroweave.engine.graphs.contents import Print
from zeroweave.engine.graphs.parts import CapturedWindow
from zeroweave.engine.graphs.trial import Trial

_ROUNDS: Final = 16
"""So often a window is replayed and run again at most."""
_CHANCE: Final = 1e-7
"""Of a tensor to be refused although its graph is right. A model has thousands of tensors."""
_STRAYS: Final = 1e-3
"""The same, by replays that are astray."""
_FEWEST: Final = 3
"""So many runs at least tell where a replay may lie."""
_WIDE, _SMALL = 8.0, 2.0**-6
"""A replay is near the runs within so many times what they differ by, or within such a share of the tensor's norm."""
_NOTHING: Final = Print(-1, math.inf, math.inf)

Place = tuple[str, int]
Prints = Mapping[Place, Print]


def compared(trial: Trial, window: CapturedWindow, tell: Callable[[str | None], str | None]) -> str | None:
    """Why the graphs of a window must not be used; None if they may. `tell(why)`: any rank's reason. Collective.

    The engine is left as a run as ever leaves it.
    """
    capturer = trial.bench.capturer
    random = capturer.random
    runs, replays = [trial.left(trial.results)], list[Prints]()
    first = next((place for place in runs[0] if place[0].startswith("the result of")), None)
    why: str | None = None
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
        last, mine = index == _ROUNDS - 1, None
        if first is not None and runs[0][first] != runs[-1].get(first):
            mine = "the model does not compute the same twice, so that its graph cannot be compared"
        elif other := [
            place for place in _apart(runs, replays) if _is_other(_of(place, runs), _of(place, replays), last)
        ]:
            mine = f"its replay differs in {_named(other)}"
        if (why := tell(mine)) is not None:
            break
    capturer.resume_random(random)
    return why


def _named(places: Iterable[Place]) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in places))


def _apart(runs: Sequence[Prints], replays: Sequence[Prints]) -> list[Place]:
    """Where runs and replays do not agree so far."""
    places = {place for each in (*runs, *replays) for place in each}
    return sorted(place for place in places if not _agree(_of(place, runs), _of(place, replays)))


def _of(place: Place, windows: Sequence[Prints]) -> list[Print]:
    """What each left there; a window that left nothing there is one more value."""
    return [window.get(place, _NOTHING) for window in windows]


def _agree(runs: Sequence[Print], replays: Sequence[Print]) -> bool:
    if _strays(runs, replays):
        return False
    ours, theirs = ({each.digest for each in prints} for prints in (runs, replays))
    if not ours.isdisjoint(theirs):
        return True
    return len(runs) >= _FEWEST and len(ours) > 1 and len(theirs) > 1 and _lie_among(runs, replays)


def _lie_among(runs: Sequence[Print], replays: Sequence[Print]) -> bool:
    """Does the sketch of any replay lie between those of runs?"""
    ours = [each.sketch for each in runs]
    return any(min(ours) <= each.sketch <= max(ours) for each in replays)


def _strays(runs: Sequence[Print], replays: Sequence[Print]) -> int:
    """How many replays are astray."""
    known = {each.digest for each in runs}
    finite = [each for each in runs if math.isfinite(each.sketch)]
    if not finite:
        return sum(math.isfinite(each.sketch) for each in replays)
    whole, sketches = len(finite) == len(runs), [each.sketch for each in finite]
    low, high = min(sketches), max(sketches)
    near = max(_WIDE * (high - low), _SMALL * max(each.norm for each in finite))
    return sum(
        each.digest not in known
        and (not low - near <= each.sketch <= high + near if math.isfinite(each.sketch) else whole)
        for each in replays
    )


def _is_other(runs: Sequence[Print], replays: Sequence[Print], last: bool) -> bool:
    """Does a graph do something else than the runs? `last`: no more of them come.

    If it does the same, each order of n runs and m replays is equally likely. Then the c runs that left the same bits
    are all of those who did with C(n, c) / C(n + m, c), and replays likewise; no replay lies among the runs with
    (m + 1) / C(n + m, n), and the k that are astray are all replays with C(m, k) / C(n + m, k).
    """
    n, m, strays = len(runs), len(replays), _strays(runs, replays)
    if strays and (last or math.comb(m, strays) / math.comb(n + m, strays) < _STRAYS):
        return True
    for these, those in ((runs, replays), (replays, runs)):
        ((bits, same),) = Counter(each.digest for each in these).most_common(1)
        chance = math.comb(len(these), same) / math.comb(n + m, same)
        if chance < _CHANCE and all(each.digest != bits for each in those):
            return True
    return not _lie_among(runs, replays) and (m + 1) / math.comb(n + m, n) < _CHANCE
