"""Whether graphs do what the window did that they were captured from, bit by bit.

Where the replay left what the window had left, they do. Where it did not, the window runs once more as ever, is
replayed again, and so on: the backward of attention, for one, adds up in an order that is another one now and then.
Which orders come, and how often, is a matter of what else the device does just then: kernels lie closer together in a
replay than in a run, so that most replays may leave the same bits, and most runs other ones.

The graphs are used once each tensor agrees: some replay left the bits that some run left, or replays differ from each
other, and some replay is as near to some run as that lets expect; and no replay is astray. One is that lies far from
all runs, by what they differ from each other and by the tensor's own size, or that is not finite where they are. Of
integers none is: such as the remainders of masters, of which a little noise leaves nothing. What runs differ by is no
measure where all replays are alike: the host may count runs, and compute with the number.

They are refused for a tensor that does not agree, where chance brings that about less than once in ten million times:
most runs left the same bits and no replay did; most replays did and no run; or all of either differ. And where replays
are astray in the end, or so many are that it takes no waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, starmap
from typing import Final

from zeroweave.engine.graphs.contents import PARTS, Print
from zeroweave.engine.graphs.parts import CapturedWindow
from zeroweave.engine.graphs.trial import Trial

_ROUNDS: Final = 16
"""So often a window is replayed and run again at most."""
_CHANCE: Final = 1e-7
"""Of a tensor to be refused although its graph is right. A model has thousands of tensors."""
_STRAYS: Final = 1e-3
"""The same, by replays that are astray."""
_FEWEST: Final = 3
"""So many runs and replays at least tell what they differ by."""
_WIDE, _SMALL = 8.0, 2.0**-5
"""A replay is astray beyond so many times what runs differ by, and beyond such a share of the tensor's norm."""
_NEAR: Final = 2.0
"""A replay agrees with a run within so many times what replays differ by."""
_NOTHING: Final = Print(-1, (math.inf,) * PARTS, math.inf)

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
    if not {each.digest for each in runs}.isdisjoint(each.digest for each in replays):
        return True
    return len(runs) >= _FEWEST and _are_near(runs, replays)


def _are_near(runs: Sequence[Print], replays: Sequence[Print]) -> bool:
    """Is some replay as near to some run as replays that differ from each other let expect?

    Of what is not finite no distance tells. There it is enough that both differ among themselves.
    """
    ours, theirs = _values(runs), _values(replays)
    if not ours and not theirs:
        return min(len({each.digest for each in prints}) for prints in (runs, replays)) > 1
    between = min((math.dist(one, other) for one in ours for other in theirs), default=math.inf)
    return len(theirs) > 1 and between <= _NEAR * _spread(theirs)


def _values(prints: Sequence[Print]) -> list[tuple[float, ...]]:
    """The sketches of those that are finite, each once."""
    return list({each.digest: each.sketch for each in prints if each.finite}.values())


def _spread(sketches: Sequence[tuple[float, ...]]) -> float:
    """The largest distance between two of them."""
    return max(starmap(math.dist, combinations(sketches, 2)), default=0.0)


def _strays(runs: Sequence[Print], replays: Sequence[Print]) -> int:
    """How many replays are astray."""
    known = {each.digest for each in runs}
    others = [each for each in replays if each.digest not in known]
    sketches, finite = _values(runs), [each for each in runs if each.finite]
    if not others or not finite:
        return sum(each.finite for each in others)
    near = max(_WIDE * _spread(sketches), _SMALL * max(each.norm for each in finite))
    whole = len(finite) == len(runs)
    return sum(min(math.dist(each.sketch, one) for one in sketches) > near if each.finite else whole for each in others)


def _is_other(runs: Sequence[Print], replays: Sequence[Print], last: bool) -> bool:
    """Does a graph do something else than the runs, with which it does not agree? `last`: no more of them come.

    If it does the same, each order of n runs and m replays is equally likely. Then the c runs that left the same bits
    are all of those who did with C(n, c) / C(n + m, c), and replays likewise; runs and replays lie apart with
    2 / C(n + m, n), and the k that are astray are all replays with C(m, k) / C(n + m, k).
    """
    n, m, strays = len(runs), len(replays), _strays(runs, replays)
    if strays and (last or math.comb(m, strays) / math.comb(n + m, strays) < _STRAYS):
        return True
    for these, those in ((runs, replays), (replays, runs)):
        ((bits, same),) = Counter(each.digest for each in these).most_common(1)
        chance = math.comb(len(these), same) / math.comb(n + m, same)
        if chance < _CHANCE and all(each.digest != bits for each in those):
            return True
    return 2 / math.comb(n + m, n) < _CHANCE
