"""What the program hands in, however large: it lies among a checkpoint's tensors, and comes back on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zeroweave as zw
from tests.distributed.checkpoint.runs import make, train
from tests.support.harness import Pools


def state(factor: float) -> dict[str, Any]:
    """An average of weights and a replay buffer, of more than a manifest's value may have."""
    average = {"w": torch.arange(2.0**19).mul_(factor), "b": torch.full((300, 7), factor, dtype=torch.bfloat16).T}
    return {"average": average, "replay": [(np.arange(2**18) * factor, "x")], "best": factor}


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        all(torch.equal(a["average"][key], b["average"][key]) for key in ("w", "b"))
        and np.array_equal(a["replay"][0][0], b["replay"][0][0])
        and type(a["replay"][0]) is tuple
        and a["best"] == b["best"]
    )


def saves(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        train(engine, 1)
        for tag, asynchronous in (("beside", True), ("at once", False)):
            mine = state(2.0) if engine.rank == 0 else state(3.0)
            engine.save(folder, tag.replace(" ", "-"), mine, asynchronous=asynchronous)
            mine["average"]["w"].zero_()  # the program goes on with its own
            mine["replay"][0][0].fill(0)
            train(engine, 1)
        manifest = (folder / "at-once" / "manifest.json").read_bytes()
        assert b"client/2" in manifest and len(manifest) < 1 << 16
        for tag in ("beside", "at-once"):
            found = engine.load(folder, tag)
            assert alike(found, state(2.0))
            found["average"]["w"].add_(1)  # it has memory of its own


def loads(folder: Path) -> None:
    with make("plain", "adamw", 1, "eager", 1) as engine:
        assert alike(engine.load(folder), state(2.0))
        files = [file for file in (folder / "at-once").iterdir() if file.suffix == ".safetensors"]
        largest = max(files, key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[-(1 << 20)] ^= 1
        largest.write_bytes(content)
        before = engine.state_dict()
        with pytest.raises(zw.CheckpointError, match=f"{largest.name} is damaged.*by its tag: beside"):
            engine.load(folder)
        after = engine.state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_large_tensors_of_the_program(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(saves, tmp_path)
    loads(tmp_path)  # with one rank
