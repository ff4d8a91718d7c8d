"""A program with a default device: what is made in host memory says so. "meta" stands for "cuda"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from zeroweave.data import GlobalBatchSampler


@contextmanager
def default(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Doubling(torch.optim.Optimizer):
    """Element-wise, which has to be found out."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=2 * group["lr"])


def started(optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any) -> zw.Engine:
    with torch.device("cpu"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return zw.initialize(module, optimizer(module.parameters()), {"compile": {"enabled": False}, **settings})


def trained(engine: zw.Engine, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    return list(engine.state_dict().values())


def resumed(folder: Path, x: torch.Tensor) -> list[torch.Tensor]:
    client = {"small": torch.zeros(0, device="cpu"), "large": torch.ones(3000, device="cpu")}
    with started(stage=2) as engine:
        trained(engine, x)
        engine.save(folder, client_state=client)
    with started() as engine:
        back = engine.load(folder)
        return [
            *trained(engine, x),
            *back.values(),
            engine.full("0.weight", "exp_avg"),
            engine.full("0.weight", "step"),
        ]


def from_file(folder: Path, x: torch.Tensor) -> list[torch.Tensor]:
    with started() as engine:
        engine.export(folder / "exported")
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    with zw.initialize(module, None, {"compile": {"enabled": False}}, weights=folder / "exported") as engine:
        return list(engine.state_dict().values())


def samples(folder: Path, x: torch.Tensor) -> list[torch.Tensor]:
    each = [list(GlobalBatchSampler(range(7), 3, 0, 1, shuffle=shuffle)) for shuffle in (False, True)]  # type: ignore[arg-type]
    return [torch.tensor(batch, device="cpu") for batches in each for batch in batches]


CASES: dict[str, Callable[[Path, torch.Tensor], list[torch.Tensor]]] = {
    "resumed": resumed,
    "weights of a file": from_file,
    "samples": samples,
    "offload": lambda _, x: trained(started(stage=3, offload={"params": True, "optimizer": "all"}), x),
    "an optimizer of the program's own": lambda _, x: trained(started(lambda p: zw.element_wise(Doubling(p))), x),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_with_a_default_device(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 12).view(2, 6)
    expected = CASES[name](tmp_path / "without", x)
    with default("meta"):
        found = CASES[name](tmp_path / "with", x)
    assert len(found) == len(expected) and all(a.equal(b) for a, b in zip(found, expected, strict=True))
