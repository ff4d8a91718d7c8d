"""The end of an engine on a GPU that has no room for the optimizer's whole state."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeroweave as zw
from benchmarks.models import build
from tests.gpu.jobs import WIDE, adamw, config, deterministic, join, step, tokens
from zeroweave.optim.state_memory import Room

MIB = 2**20
Ranks = Callable[..., list[Any]]


def ended(engine: Any, nbytes: int | None, host: bool) -> tuple[set[str], int, list[str]]:
    """Ends the engine where `nbytes` are left of the GPU beside the full parameters, and perhaps no host memory.

    Returns the devices of the moments, the bytes by which the memory in use grew at most, and the warnings.
    """
    room = Room.now
    dropped = patch.object(Room, "now", lambda device: room(device) if host else room(device)._replace(host=0))
    gc.collect()
    torch.cuda.empty_cache()
    total, before = torch.cuda.mem_get_info()[1], torch.cuda.memory_allocated()
    if nbytes is not None:
        whole = sum(p.numel() * p.dtype.itemsize for p in engine.module.parameters())
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + whole + nbytes) / total)
    torch.cuda.reset_peak_memory_stats()
    try:
        with dropped, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.destroy()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    held = {s["exp_avg"].device.type for s in engine.optimizer.state.values() if "exp_avg" in s}
    texts = [str(one.message) for one in caught if "optimizer's state" in str(one.message)]
    return held, torch.cuda.max_memory_allocated() - before, texts


def courses(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """Losses with a stop in the middle, by where the state went meanwhile."""
    device, found = join(), {}
    for name, nbytes, host in (("device", None, True), ("host", 600 * MIB, True), ("nowhere", 600 * MIB, False)):
        with deterministic():
            torch.manual_seed(0)
            model = build(WIDE, device, dtype)
            optimizer = adamw(model.parameters())
            losses: list[float] = []
            end: Any = None
            for _ in range(2):
                engine = zw.initialize(model, optimizer, config(stage, "eager", dtype))
                losses += [step(engine, tokens(WIDE, device, index)) for index in range(2)]
                if end is None:
                    end = ended(engine, nbytes, host)
                else:
                    engine.destroy(optimizer_state=False)
            found[name] = (losses, *end)
        del engine, model, optimizer
        gc.collect()
    return found


@pytest.mark.parametrize(("stage", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_the_state_goes_where_there_is_room(ranks: Ranks, stage: int, dtype: torch.dtype) -> None:
    for rank, found in enumerate(ranks(courses, stage, dtype)):
        assert [found[name][1] for name in ("device", "host", "nowhere")] == [{"cuda"}, {"cpu"}, set()]
        assert found["host"][0] == found["device"][0], "the same training, bit for bit"
        assert found["host"][2] < found["device"][2] - 500 * MIB, found
        told = found["nowhere"][3]
        assert len(told) == (rank == 0) and not found["host"][3] + found["device"][3], found
        assert all("the GPU of rank" in text and "0 GiB of host memory" in text for text in told)
