"""What the ranks do in the GPU tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeroweave as zw
from tests.distributed.checkpoint.runs import differing
from tests.gpu.jobs import SMALL, WIDE, config, deterministic, join, start, step, tokens
from tests.gpu.offload_jobs import OFFLOADS

DELAY = 400_000_000
"""Clock cycles: some tenths of a second."""


def states(engine: zw.Engine) -> dict[str, Tensor]:
    """All masters and moments, whole, on the CPU."""
    found = {}
    for name, _ in engine.module.named_parameters():
        for what in ("param", "exp_avg", "exp_avg_sq"):
            value = engine.full(name, what)
            assert value is not None
            found[f"{what} of {name}"] = value.cpu()
    return found


def train(engine: zw.Engine, device: torch.device, steps: int, delay: int = 0) -> list[float]:
    """`delay`: cycles that the device sleeps in front of each step, so that the host is ahead of it."""
    losses = []
    for _ in range(steps):
        if delay:
            torch.cuda._sleep(delay)
        losses.append(step(engine, tokens(SMALL, device, engine.micro_steps)))
    return losses


def resumed(folder: Path, stage: int, mode: str, offload: str, asynchronous: bool, other: str) -> list[str]:
    """Saves, trains on, and does the same again in a new engine with the offload `other`; what differs."""
    device = join()
    with deterministic():
        settings = {**config(stage, mode, torch.bfloat16), "offload": OFFLOADS[offload]}
        with start(SMALL, settings, torch.bfloat16) as engine:
            train(engine, device, 4)
            saved = states(engine)
            engine.save(folder, "a", asynchronous=asynchronous)
            run = {"saved": saved, "losses": train(engine, device, 5), "end": states(engine)}
        with start(SMALL, {**settings, "offload": OFFLOADS[other]}, torch.bfloat16) as engine:
            engine.load(folder, "a")
            again = {"saved": states(engine), "losses": train(engine, device, 5), "end": states(engine)}
    return differing(run, again)


def goes_on(folder: Path, stage: int, mode: str) -> None:
    """Saves as "four" and trains on; leaves beside it what was saved, and how the run went on."""
    device = join()
    with deterministic(), start(SMALL, config(stage, mode, torch.bfloat16), torch.bfloat16) as engine:
        train(engine, device, 4)
        saved = states(engine)
        engine.save(folder, "four")
        run = {"saved": saved, "losses": train(engine, device, 5), "end": states(engine)}
    torch.save(run, folder / f"run{dist.get_rank()}.pt")


def passes_on(folder: Path, stage: int, mode: str) -> list[str]:
    """Loads "four" and saves it as "two"; what differs from what was saved."""
    join()
    with start(SMALL, config(stage, mode, torch.bfloat16), torch.bfloat16) as engine:
        engine.load(folder, "four")
        found = states(engine)
        engine.save(folder, "two")
    return differing(torch.load(folder / f"run{dist.get_rank()}.pt")["saved"], found)


def takes_up(folder: Path, stage: int, mode: str) -> list[str]:
    """Loads "two" and trains on; what differs from the run that went on at once."""
    device = join()
    with deterministic(), start(SMALL, config(stage, mode, torch.bfloat16), torch.bfloat16) as engine:
        engine.load(folder, "two")
        run = {"saved": states(engine), "losses": train(engine, device, 5), "end": states(engine)}
    return differing(torch.load(folder / f"run{dist.get_rank()}.pt"), run)


def overtaken(folder: Path, stage: int, offload: str) -> list[str]:
    """The host is several steps ahead of the device while buckets are copied and updated; each save is checked."""
    device, found = join(), []
    with deterministic():
        settings = {**config(stage, "eager", torch.bfloat16), "offload": OFFLOADS[offload]}
        with start(SMALL, settings, torch.bfloat16) as engine:
            train(engine, device, 4)
            expected = {}
            for number in range(6):
                engine.save(folder, f"t{number}", asynchronous=True)
                expected[number] = states(engine)
                train(engine, device, 1 + number % 3, delay=DELAY // 8)
            engine.save(folder, "last")
            for number, states_then in expected.items():
                engine.load(folder, f"t{number}")
                found += differing(states_then, states(engine), f"t{number}")
    return found


def blocks(folder: Path) -> tuple[bool, bool]:
    """Is the device still busy with what came before an asynchronous save, when that returns? And a step later?"""
    device = join()
    with start(SMALL, config(3, "eager", torch.bfloat16), torch.bfloat16) as engine:
        train(engine, device, 4)
        engine.save(folder, "first", asynchronous=True)
        train(engine, device, 4)
        batch = tokens(SMALL, device, 99)  # now: its copy to the device waits for what came before
        torch.cuda.synchronize()
        torch.cuda._sleep(4 * DELAY)
        slept = torch.cuda.Event()
        slept.record()
        engine.save(folder, "second", asynchronous=True)
        after_save = slept.query()
        engine.train_step((batch, batch))
        return not after_save, not slept.query()


def pinned_bytes(folder: Path) -> tuple[int, int, int]:
    """Device bytes before, at the peak of a step beside a save, and of a step without one."""
    device = join()
    with start(WIDE, config(3, "eager", torch.bfloat16), torch.bfloat16) as engine:

        def peak() -> int:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            batch = tokens(WIDE, device, 1)
            engine.train_step((batch, batch))
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()

        for _ in range(12):
            peak()  # until the schedule has settled, which decides how much is gathered at once
        plain = peak()
        engine.save(folder, "a", asynchronous=True)
        beside: Any = peak()
        return torch.cuda.memory_allocated(), beside, plain
