"""Whether graphs do what the window did that they were captured from, bit by bit.

Where the replay left what the window had left, they do. Where it did not, the window runs once more as ever, is
replayed again, and so on: the backward of attention, for one, adds up in an order that is another one now and then.
The graphs are used once each tensor agrees. It does where some replay left the bits that some run left. It does, too,
where no two runs left the same bits, and replays lie among the runs.

They are refused for a tensor where chance brings that about less than once in ten million times: most runs left the
same bits and no replay did, or all replays lie beyond all runs. Where neither is so after the last round, the replays'
tensors are not told from those of runs, and the graphs are used.
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
_FEWEST: Final = 3
"""So many runs at least that all differ tell that runs do."""
_NOTHING: Final = Print(-1, math.inf)

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
        mine = None
        if first is not None and runs[0][first] != runs[-1].get(first):
            mine = "the model does not compute the same twice, so that its graph cannot be compared"
        elif other := [place for place in _apart(runs, replays) if _chance(place, runs, replays) < _CHANCE]:
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
    ours, theirs = ([each.digest for each in prints] for prints in (runs, replays))
    if not set(ours).isdisjoint(theirs):
        return True
    return len(set(ours)) == len(ours) >= _FEWEST and not _lie_beyond(runs, replays)


def _lie_beyond(runs: Sequence[Print], replays: Sequence[Print]) -> bool:
    """Do the sketches of the ones lie on one side of those of the others?"""
    ours, theirs = ([each.sketch for each in prints] for prints in (runs, replays))
    return max(ours) < min(theirs) or max(theirs) < min(ours)


def _chance(place: Place, runs: Sequence[Prints], replays: Sequence[Prints]) -> float:
    """How likely such n runs and m replays are if they do the same.

    The c that left the same bits are all runs: C(n, c) / C(n + m, c), by the hypergeometric distribution. All replays
    lie on one side of all runs: 2 / C(n + m, n), as each order of n + m is equally likely.
    """
    n, m, ours, theirs = len(runs), len(replays), _of(place, runs), _of(place, replays)
    ((_, same),) = Counter(each.digest for each in ours).most_common(1)
    beyond = 2 / math.comb(n + m, n) if _lie_beyond(ours, theirs) else 1.0
    return min(beyond, math.comb(n, same) / math.comb(n + m, same))
