"""How the GPUs of this machine would gather: measured between ranks, as an engine does when it is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeroweave.comm.choose import SIZES, Choice, Cost, choose, refused
from zeroweave.comm.copy_engine import CopyEngines
from zeroweave.ranks.control import Control

_MARK = "gathers: "
_SECONDS = 120.0
"""How long the ranks may take."""


def measured(ranks: int) -> Choice:
    """What an engine of this many ranks, on a GPU each, would choose. RuntimeError where they fail."""
    script = ["--standalone", "--nproc-per-node", str(ranks), "-m", __name__]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *script],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result after {_SECONDS:g} s") from None
    return found(done.stdout, done.stderr)


def found(output: str, errors: str) -> Choice:
    """What the ranks have printed."""
    for line in output.splitlines():
        if line.startswith(_MARK):
            told: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            kernel, copies = (tuple(Cost(**each) for each in told[way]) for way in ("kernel", "copy_engine"))
            return Choice(told["why"], told["least"], kernel, copies)
    lines = [line.strip() for line in errors.splitlines() if "rror:" in line]
    raise RuntimeError(lines[-1] if lines else "the ranks told nothing")


def told(choice: Choice) -> str:
    """As `found` reads it."""
    return _MARK + json.dumps(asdict(choice))


def main() -> None:
    """On each rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    control = Control.over(None, _SECONDS)
    choice = Choice(refused("auto", control, device, SIZES[-1]))
    if not choice.why:
        engines, plain = CopyEngines(control, device), dist.group.WORLD
        assert plain is not None
        own = engines.join(timedelta(seconds=_SECONDS))
        choice = choose("auto", control, device, engines, plain, own, SIZES[-1])
        engines.close()
    if control.rank == 0:
        print(told(choice), flush=True)
    control.barrier("the end")
    control.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
