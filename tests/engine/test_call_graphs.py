"""Engines whose templates run as graphs of calls train as engines without graphs do, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support import programs
from tests.support.graph_double import GraphDouble
from tests.support.loops import Case, Program, compared, loop
from tests.support.marks import daily

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * mask


class Body(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        states = []
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpoints else block(x, mask)
            states.append(x)
        return states


class Model(nn.Module):
    """`checkpoints`: its blocks are recomputed. `shows`: the hidden states are returned, too."""

    def __init__(self, checkpoints: bool = False, shows: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.body, self.shows = Body(checkpoints), shows

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        states = self.body(x, (tokens % 5 > 0).to(x.dtype)[..., None])
        logits = self.head(states[-1])
        return (logits, states) if self.shows else logits


@pytest.fixture
def double() -> Iterator[GraphDouble]:
    made = GraphDouble(1 << 24)
    with patch("zeroweave.engine.assembly.capture_for", lambda device: made):
        yield made


def engine_of(
    graphs: bool,
    stage: int,
    gas: int = 1,
    lower: str = "aot_eager",
    check: bool = False,
    regions: Any = "auto",
    **model: Any,
) -> zw.Engine:
    torch.manual_seed(0)
    built = Model(**model)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    compile_ = {"lower": lower, "cuda_graphs": graphs, "regions": regions}
    config = {
        "gradient_clipping": 1.0,
        "stage": stage,
        "gradient_accumulation_steps": gas,
        "compile": compile_,
        "debug": {"check_graphs": check},
    }
    return zw.initialize(built, optimizer, config=config)


def tokens_of(index: int, lengths: tuple[int, ...]) -> Tensor:
    return torch.randint(16, (2, lengths[index % len(lengths)]), generator=torch.Generator().manual_seed(index))


def train(engine: zw.Engine, steps: int, lengths: tuple[int, ...]) -> list[float]:
    losses, kept = [], []
    for index in range(steps * engine.config.gradient_accumulation_steps):
        torch.manual_seed(index)
        tokens = tokens_of(index, lengths).to(engine.device)
        output = engine(tokens)
        if isinstance(output, tuple):
            output, states = output
            kept = [*kept[-2:], (states[-1], states[-1].detach().clone())]
        loss = F.cross_entropy(output.flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        assert all(torch.equal(now, then) for now, then in kept)
        if index % 7 == 6:
            with torch.no_grad():
                engine(tokens)
    return losses


def same_parameters(one: zw.Engine, other: zw.Engine) -> bool:
    pairs = [(one.full(name), other.full(name)) for name, _ in one.module.named_parameters()]
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


SETTINGS: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((6,), 1, {}),
    ((6, 4, 9), 1, {}),
    ((6, 4), 2, {}),
    ((6,), 3, {"checkpoints": True}),
    ((6,), 1, {"shows": True}),
]


@daily(
    ("stage", "lengths", "gas", "model"),
    [(stage, *SETTINGS[setting]) for stage, setting in ((2, 1), (3, 3))],
    [(stage, *SETTINGS[setting]) for stage in (1, 2, 3) for setting in range(5)],
)
def test_trains_as_without_graphs(
    double: GraphDouble, stage: int, lengths: tuple[int, ...], gas: int, model: dict[str, Any]
) -> None:
    plain = engine_of(False, stage, gas, **model)
    wanted = train(plain, 14, lengths)
    engine = engine_of(True, stage, gas, **model)
    got = train(engine, 14, lengths)
    assert got == wanted
    assert same_parameters(engine, plain)
    assert double.replays > 2 * double.captures > 0
    assert engine.stats.graphed_calls == double.replays
    # An evaluation inside of a window is no part of the recording, where gradients wait in the graphs' memory.
    assert engine.stats.ungraphed_calls.keys() <= ({"the calls are others"} if gas > 1 else set())
    engine.destroy()
    plain.destroy()


@daily("stage", [3], [1, 2])
def test_all_blocks_as_one_region(double: GraphDouble, stage: int) -> None:
    """One forward and one backward for each step."""
    plain, engine = engine_of(False, stage, regions=["body"]), engine_of(True, stage, regions=["body"])
    assert train(engine, 14, (6, 4)) == train(plain, 14, (6, 4))
    assert same_parameters(engine, plain)
    assert engine.stats.regions == 1 and double.captures > 0
    assert engine.stats.compiled_calls - engine.stats.graphed_calls < 14 < engine.stats.graphed_calls
    engine.destroy()
    plain.destroy()


@daily("stage", [3], [1, 2])
def test_new_graphs_are_compared_with_their_code(double: GraphDouble, stage: int) -> None:
    plain, engine = engine_of(False, stage, 2), engine_of(True, stage, 2, check=True)
    assert train(engine, 10, (6, 4)) == train(plain, 10, (6, 4))
    assert same_parameters(engine, plain)
    assert double.captures > 0 and engine.stats.graph_difference == 0.0
    engine.destroy()
    plain.destroy()


def test_a_graph_that_computes_something_else_is_told() -> None:
    class Wrong(GraphDouble):
        def capture(self, run: Any, args: list[Any]) -> Any:
            graph, results = super().capture(run, args)
            if isinstance(results[0], Tensor) and results[0].is_floating_point():
                with torch.no_grad():
                    results[0].add_(0.25)
            return graph, results

    with patch("zeroweave.engine.assembly.capture_for", lambda device: Wrong(1 << 24)):
        engine = engine_of(True, 2, check=True)
    train(engine, 8, (6,))
    assert engine.stats.graph_difference == pytest.approx(0.25)
    engine.destroy()


LOOPS = [
    *(Case(stage, gas, loop, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 4) for loop in ("train_step", "plain")),
    *(Case(stage, 2, "clipped", decay=True) for stage in (2, 3)),
    *(Case(3, gas, loop, overflow=20, clipping=0.1, decay=True) for gas in (1, 3) for loop in ("train_step", "plain")),
    *(Case(stage, 4, loop, dropout=0.1) for loop in ("coalesced", "no_sync") for stage in (3, 2, 1)),
    *(Case(stage, 3, "plain", frozen=True) for stage in (2, 1)),
    *(Case(stage, gas, "busy", steps=64, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 3)),
    Case(2, 3, "busy", steps=64, dropout=0.1, frozen=True),
    Case(2, sizes=(4, 6)),
    Case(3, reads=True, dropout=0.1),
    Case(3, cycle=True),
    Case(2, 2, config={"precision": {"accumulate": "bfloat16"}, "reduce": {"depth": 1}}),
    Case(3, 2, "plain", dropout=0.1, config={"activations": {"free_threshold_bytes": 64}}),
]
DAILY = [Case(2, 2, "clipped", decay=True)]
PROGRAMS: list[tuple[Program, Case]] = [
    (programs.autocast, Case(dropout=0.1)),
    (programs.autocast_around, Case()),
    (programs.modes, Case(dropout=0.1)),
    (programs.total, Case()),
    (programs.shapes, Case()),
    (programs.seeded, Case(dropout=0.2)),
    *((programs.irregular, Case(stage, gas, dropout=0.1)) for stage in (1, 2, 3) for gas in (1, 2)),
]


def named(value: object) -> str:
    return getattr(value, "__name__", str(value))


@daily("case", DAILY, [case for case in LOOPS if case not in DAILY], ids=str)
def test_loops(case: Case) -> None:
    differs, told = compared(lambda engine: loop(engine, case), case)
    assert not differs
    assert told.launched > case.steps and told.launched > 2 * told.captures, told


@daily(("program", "case"), PROGRAMS[-1:], PROGRAMS[:-1], ids=named)
def test_programs(program: Program, case: Case) -> None:
    differs, told = compared(program, case)
    assert not differs
    assert told.launched > 2 * told.captures > 0, told
