"""One execution of a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroweave.runtime.replay import Replay
from zeroweave.schedule import Call


@dataclass(slots=True, eq=False)
class Frame:
    """One execution of a call.

    `handles` counts the views of flats that its eager code saved for the backward, `unpacked` those that a backward
    beside the tape has asked for; `parts` counts the compiled forwards in it that have a backward, `over` the backwards
    of those. `origin` is the forward call whose backward this is, or which it runs again. `number` is its place among
    the window's equal calls, from 0. `is_read`: eager code reads a parameter that no call announced. `covered`: another
    frame holds its buckets.

    On the tape, `backward` is the open backward of a forward frame; `saves`: its graph keeps values of parameters,
    which a backward that comes to it reads; `trains`: it does wherever its input has a gradient, and has one itself;
    `silent`: it keeps no graph, because it runs again in the backward, or has none. `segment`: see
    `_torch.checkpoint_segment`.
    """

    call: Call
    uses: tuple[int, ...]
    replay: Replay
    parent: Frame | None = None
    origin: Frame | None = None
    number: int = 0
    announced: set[tuple[int, int]] = field(default_factory=set)
    reads: list[Frame] = field(default_factory=list)
    handles: int = 0
    unpacked: int = 0
    parts: int = 0
    over: int = 0
    is_read: bool = False
    covered: bool = False
    backward: Frame | None = None
    saves: bool = False
    trains: bool = False
    silent: bool = False
    segment: object = None
    on_tape: bool = False
