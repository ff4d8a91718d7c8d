"""How the GPUs of this machine would gather: measured between ranks, as an engine does when it is made."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeroweave.comm.choose import SIZES, Choice, Cost, choose, refused
from zeroweave.comm.copy_engine import CopyEngines
from zeroweave.comm.process_group import device_of
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import start_process_group
from zeroweave.report.apart import answer_of, run

_MARK = "gathers: "
_SECONDS = 120.0
"""How long the ranks may take."""


def measured(ranks: int) -> Choice:
    """What an engine of this many ranks, on a GPU each, would choose. RuntimeError where they fail."""
    return found(*run(__name__, ranks, _SECONDS))


def found(output: str, errors: str) -> Choice:
    """What the ranks have printed."""
    answer: dict[str, Any] = answer_of(_MARK, output, errors)
    kernel, copies = (tuple(Cost(**each) for each in answer[way]) for way in ("kernel", "copy_engine"))
    return Choice(answer["why"], answer["least"], kernel, copies)


def told(choice: Choice) -> str:
    """As `found` reads it."""
    return _MARK + json.dumps(asdict(choice))


def main() -> None:
    """On each rank."""
    start_process_group(_SECONDS)
    device = device_of(dist.group.WORLD)
    control = Control.over(None, _SECONDS)
    choice = Choice(refused("auto", control, device, SIZES[-1]))
    if not choice.why:
        engines, plain = CopyEngines(control, device), dist.group.WORLD
        assert plain is not None
        own = engines.join(timedelta(seconds=_SECONDS))
        choice = choose("auto", control, device, engines, plain, own, SIZES[-1], alone=True)
        engines.close()
    if control.rank == 0:
        print(told(choice), flush=True)
    control.barrier("the end")
    control.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
