"""Manifests that chance has changed under right checksums; test_torn.py has checkpoints whose bytes are damaged."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.checkpoint.small import lying
from tests.support.marks import MODES, daily
from zeroweave.checkpoint.manifest import parse
from zeroweave.errors import CheckpointError

HOSTILE = 10
"""Checkpoints of one row: 20 rows are 200."""
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1 << 62, 1 << 70, 1e308, -0.5, "", "x", "../x", "\0", "~tuple", "F64", "x" * 5000,
    [], {}, [[]], [1, "x"], {"x": 1}, {"~tuple": [1]}, {"~stored": "client/0"}, {"~float": "nan"}, [None] * 100,
)  # fmt: skip


class Run:
    """An engine, and what it has saved."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.engine = zw.initialize(self.model, optimizer, {"compile": MODES["eager"]}, lr_scheduler=scheduler)
        self.step()
        self.folder, self.whole = folder / "runs", folder / "whole"
        client = {"numbers": [1, 2.5], "tensor": torch.randn(2000)}
        self.engine.save(self.whole, "one", client_state=client)

    def step(self) -> None:
        self.engine.backward(self.engine(torch.randn(6, 3)).square().mean())
        self.engine.step()

    def copy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)

    def load(self, seed: str) -> bool:
        """False where the engine refuses the copy, as it should."""
        begin = time.process_time()
        try:
            self.engine.load(self.folder)
            return True
        except CheckpointError:
            return False
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            assert time.process_time() - begin < 30, seed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = Run(tmp_path_factory.mktemp("fuzzed"))
    made.copy()
    assert made.load("none")
    with made.engine:
        yield made


OF_OPTIMIZERS = ("/values/optimizer", "/values/scalar/", "/tensors/state/")
"""Where a manifest has what only the optimizer can judge: its next step may raise."""


def changed(chance: random.Random, fields: Any) -> str:
    """Changes a value, or a key, anywhere in a manifest; which, in words."""
    place, within = "", fields
    while True:
        keys = list(within) if isinstance(within, dict) else list(range(len(within)))
        key = chance.choice(keys)
        place += f"/{key}"
        inner = within[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.9:
            within = inner
            continue
        value = chance.choice(VALUES)
        if isinstance(within, dict) and chance.random() < 0.2:
            within[str(value)[:50]] = within.pop(key)
        elif chance.random() < 0.1:
            del within[key]
        else:
            within[key] = value
        return f"{place}: {str(value)[:50]!r}"


@daily("row", [0], range(1, 20))
def test_what_is_hostile_is_refused_or_does_no_harm(run: Run, row: int) -> None:
    refused = 0
    for number in range(HOSTILE):
        seed = f"hostile {row} {number}"
        run.copy()
        manifest = run.folder / "one" / "manifest.json"
        right = parse(manifest.read_bytes())
        fields = right.model_dump(mode="json", exclude={"checksum"})
        chance = random.Random(seed)
        what = changed(chance, fields)
        content = lying(right, fields)
        manifest.write_bytes(content)
        (run.folder / "latest").write_text(json.dumps({"tag": "one", "manifest": content[13:45].decode()}))
        if run.load(seed):  # such a number, or name, could have been saved
            try:
                run.step()
            except Exception as error:
                if not what.startswith(OF_OPTIMIZERS):
                    raise AssertionError(f"seed {seed}: {what}: {type(error).__name__}: {error}") from error
        else:
            refused += 1
        run.copy()
        assert run.load(seed), "what was refused has changed the engine"
    assert refused
