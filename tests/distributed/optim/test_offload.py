"""Offload changes no bit: engines with optimizer states, or all shards, in host memory beside ones without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.engine.coalescing import MODES, backwards
from tests.distributed.engine.test_accessors import squared
from tests.support.harness import Pools
from tests.support.marks import daily, slow
from tests.support.models import entry
from tests.support.reference import build
from tests.support.zoo import Entry, regression
from zeroweave.engine.stats import Memory
from zeroweave.layout import BucketLayout

STEPS = 3


class Whole(torch.optim.AdamW):
    """Of a class that nobody knows: stepped as a whole."""


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "whole": lambda parameters: zw.element_wise(Whole(parameters, lr=1e-2)),
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "all"},
    "adaptive": {"optimizer": "adaptive", "memory_budget": 6000},
    "params": {"params": True},
    "both": {"optimizer": "all", "params": True},
}
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "clipped": {"gradient_clipping": 0.05},
    "coalesced": {},
    "float16, overflowing": {"precision": {"params": "float16", "initial_loss_scale": 2.0**20}},
    "checked": {"on_nonfinite": "skip", "gather_after_step": True},
    "tiny buckets": {"bucket": {"bytes": 3000}},
    "compact": {"precision": {"params": "bfloat16", "optimizer": "compact"}},
    "compact, clipped": {"precision": {"params": "bfloat16", "optimizer": "compact"}, "gradient_clipping": 0.05},
}


@dataclass(frozen=True)
class Case:
    offload: str
    stage: int
    mode: str
    params: str | None = None
    more: str = ""
    model: str = "mlp"
    optimizer: str = "adamw"

    def __str__(self) -> str:
        words = (self.offload, f"z{self.stage}", self.mode, self.params, self.more, self.model, self.optimizer)
        return "-".join(word for word in words if word)

    def config(self, offload: str) -> dict[str, Any]:
        more = MORE[self.more]
        config = {
            "stage": self.stage,
            "compile": {**MODES[self.mode], "record_steps": 0},
            "precision": {"params": self.params},
            "deadline_seconds": 200.0,
            **more,
        }
        return config if not offload else {**config, "offload": OFFLOADS[offload]}


@dataclass(frozen=True)
class Course:
    """What training was like on one rank, in bits."""

    applied: list[bool]
    norms: list[float | None]
    values: dict[str, Tensor]
    saved: dict[str, Tensor]
    traffic: dict[str, int]
    departures: int
    memory: list[Memory]
    buckets: tuple[BucketLayout, ...]


def model_of(name: str) -> Entry:
    """A model whose loss is float32 whatever it computes in, which PyTorch 2.11 needs."""
    found = entry(name)
    return replace(found, micro=squared) if found.micro is regression else found


def value_of(engine: Any, name: str, key: str) -> Tensor:
    try:
        return engine.full(name, key)
    except zw.EngineError:  # a parameter that never had a gradient
        return torch.zeros(0)


def course(case: Case, offload: str) -> Course:
    model, steps = model_of(case.model), STEPS
    if case.more.startswith("float16"):
        steps += 15  # until the scale is low enough
    elif case.offload == "adaptive":
        steps += 2  # until the budget is used
    module = build(model)
    optimizer = OPTIMIZERS[case.optimizer]([p for p in module.parameters() if p.requires_grad])
    applied, norms, memory = [], [], []
    with zw.initialize(module, optimizer, case.config(offload)) as engine:
        for _ in range(steps):
            backwards(engine, model, 4 if case.more == "coalesced" else 1, case.more == "coalesced")
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            engine.set_gradient_accumulation_boundary(None)
            applied.append(engine.was_step_applied())
            norms.append(engine.get_global_grad_norm())
            memory.append(engine.stats.memory)
        values = {}
        for name, parameter in module.named_parameters():
            keys = ["param"]
            if parameter.requires_grad and any(applied):
                keys += ["momentum_buffer"] if case.optimizer == "momentum" else ["exp_avg", "exp_avg_sq", "step"]
            values |= {f"{key} of {name}": value_of(engine, name, key) for key in keys}
        traffic = {kind: each.calls for kind, each in engine.stats.last_step.items()}
        saved = engine.state_dict()
        return Course(applied, norms, values, saved, traffic, engine.stats.departures, memory, engine.buckets)


def bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


def beside(case: Case) -> tuple[Course, list[Memory]]:
    here, there = course(case, ""), course(case, case.offload)
    assert (here.applied, here.norms, here.traffic) == (there.applied, there.norms, there.traffic)
    assert any(here.applied) and all(here.applied) == (not case.more.startswith("float16"))
    assert here.departures == there.departures == 0
    assert here.values.keys() == there.values.keys()
    differing = [key for key, value in here.values.items() if not torch.equal(value, there.values[key])]
    assert not differing, differing
    assert bits(here.saved, there.saved)
    return there, here.memory


DAILY = [
    Case("optimizer", 1, "aot_eager", "bfloat16"),
    Case("optimizer", 2, "eager", None, "coalesced", "tied", "momentum"),
    Case("optimizer", 2, "aot_eager", "bfloat16", "clipped", "frozen_inside"),
    Case("optimizer", 1, "eager", "bfloat16", "checked", "unused"),
    Case("adaptive", 3, "eager", "bfloat16"),
    Case("params", 3, "aot_eager", "bfloat16", "clipped", "tied"),
    Case("both", 3, "aot_eager", None, "float16, overflowing"),
    Case("both", 3, "eager", None, "coalesced", "frozen_inside", "momentum"),
    Case("both", 3, "aot_eager", "bfloat16", "tiny buckets", "mlp", "whole"),
    Case("optimizer", 3, "aot_eager", "bfloat16", "compact"),
    Case("optimizer", 2, "eager", "bfloat16", "compact, clipped", "unused"),
]
PRODUCT = [
    Case(offload, stage, mode, params, more, model, optimizer)
    for offload, stage, mode, params, (more, model, optimizer) in itertools.product(
        OFFLOADS,
        (1, 2, 3),
        ("eager", "aot_eager"),
        (None, "bfloat16"),
        [
            ("", "decoder", "adamw"),
            ("clipped", "tied", "momentum"),
            ("coalesced", "frozen_inside", "adamw"),
            ("checked", "unused", "momentum"),
            ("tiny buckets", "mlp", "whole"),
            ("float16, overflowing", "mlp", "adamw"),
        ],
    )
    if (stage == 3 or not OFFLOADS[offload].get("params"))
    and (stage < 3 or more != "checked")
    and (params is None or not more.startswith("float16"))
] + [
    Case("optimizer", stage, mode, "bfloat16", more, model)
    for stage, mode, (more, model) in itertools.product(
        (1, 2, 3),
        ("eager", "aot_eager"),
        [("compact", "decoder"), ("compact", "frozen_inside"), ("compact, clipped", "tied")],
    )
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case", DAILY + [pytest.param(each, marks=pytest.mark.matrix) for each in PRODUCT if each not in DAILY], ids=str
)
def test_training_is_bit_equal(pools: Pools, case: Case) -> None:
    for found, plain in pools(2).run(beside, case):
        last, before = found.memory[-1], plain[-1]
        trained = [b for b in found.buckets if b.trainable]
        elements = sum(b.shard_numel for b in trained)
        assert (last.masters, last.optimizer) == (before.masters, before.optimizer)
        half = case.params or case.more.startswith("float16")
        offload = OFFLOADS[case.offload]
        # The upper halves of masters of bfloat16 parameters are the shards, and are where these are.
        stay = 2 * elements if case.params == "bfloat16" and not offload.get("params") else 0
        if "optimizer" not in offload:
            assert last.host_optimizer == 0
        elif offload["optimizer"] == "all":
            assert last.optimizer - 300 * len(trained) <= last.host_optimizer <= last.optimizer  # beside step counters
            assert last.host_optimizer > 0
            assert last.host_masters == last.masters - stay
        else:
            first = found.memory[found.applied.index(True)]
            assert first.host_masters == first.masters - stay and first.host_optimizer > 0
            gained = last.device - first.device
            assert 0 < gained <= offload["memory_budget"] and 0 < last.host < first.host
        if offload.get("params"):
            assert last.host_shards == last.shards == sum(b.shard_numel * b.itemsize for b in found.buckets)
            assert last.host_masters == last.masters
        elif not half:
            assert last.host_shards == last.host_masters == 0
        elif case.more.startswith("compact"):
            assert (last.masters, last.shards, last.host_shards) == (3 * elements, before.shards, 0)
        elif offload["optimizer"] == "all":
            assert last.masters == 4 * elements and last.host_shards == 0
            assert last.shards == before.shards + (0 if case.params == "bfloat16" else 2 * elements)


def train(engine: Any, name: str) -> dict[str, Tensor]:
    """A step with a gradient that is replaced; what became of a parameter."""
    backwards(engine, model_of("mlp"), 1, False)
    engine.set_full(name, 0.5 * engine.full(name, "grad"), "grad")
    engine.step()
    return {key: engine.local(name, key) for key in ("param", "exp_avg", "exp_avg_sq", "step")}


def life(stage: int, params: str | None, offload: str, more: str = "") -> list[str]:
    """Reads and writes of every kind between steps, profiling, and the model after the end; names of what differs."""
    found: list[dict[str, Any]] = []
    name = "blocks.1.mlp.up.weight"
    for chosen in ("", offload):
        module = build(entry("mlp"))
        seen: dict[str, Any] = {}
        config = Case(offload, stage, "eager", params, more).config(chosen)
        engine = zw.initialize(module, OPTIMIZERS["adamw"](list(module.parameters())), config)
        seen["a step"] = train(engine, name)
        engine.set_full(name, torch.full((32, 16), 1 / 3))
        engine.set_full(name, torch.full((32, 16), 0.1), "exp_avg")
        engine.set_local(name, torch.full((engine.fragment(name).numel,), 0.2), "exp_avg_sq")
        engine.set_full(name, torch.tensor(7.0), "step")
        seen["values were set"] = train(engine, name)
        saved = engine.state_dict()
        with engine.full_parameters() as full:
            full[name].data.mul_(2)  # which nobody notices, and is kept
            full["enter.weight"].detach().add_(0.25)
        seen["parameters were written"] = train(engine, name)
        before = {key: engine.local(name, key) for key in ("param", "exp_avg", "exp_avg_sq")}
        with engine.profiling():
            backwards(engine, model_of("mlp"), 1, False)
            engine.step()
        assert all(torch.equal(engine.local(name, key), value) for key, value in before.items())
        seen["profiling"] = train(engine, name)
        engine.load_state_dict(saved)
        seen["loaded"] = dict(engine.stream_state_dict())
        with torch.no_grad():
            seen["evaluated"] = {"loss": engine(torch.ones(2, 16)).float().sum()}
        seen["loading"] = train(engine, name)
        engine.destroy()
        seen["destroyed"] = {key: p.detach() for key, p in module.named_parameters()}
        assert all(p.device.type == "cpu" and p.is_leaf for p in module.parameters())
        found.append(seen)
    here, there = found
    return [label for label in here if not bits(here[label], there[label])]


@slow("3-None-both", "3-bfloat16-both", "2-bfloat16-optimizer")
@pytest.mark.parametrize(
    ("stage", "params", "offload"),
    [(2, "bfloat16", "optimizer"), (3, "bfloat16", "both"), (3, None, "both")]
    + [
        pytest.param(*each, marks=pytest.mark.matrix)
        for each in [(1, None, "optimizer"), (3, "float16", "params"), (3, "bfloat16", "adaptive")]
    ],
)
def test_a_whole_life(pools: Pools, stage: int, params: str | None, offload: str) -> None:
    for differing in pools(2).run(life, stage, params, offload):
        assert differing == []


@daily(("stage",), [(3,)], [(1,), (2,)])
def test_a_whole_life_of_compact_states(pools: Pools, stage: int) -> None:
    assert pools(2).run(life, stage, "bfloat16", "optimizer", "compact") == [[], []]


def alone() -> bool:
    """Without an optimizer: parameters in host memory are evaluated."""
    module, outputs = build(entry("mlp")), []
    expected = module(torch.ones(2, 16)).detach()
    with zw.initialize(module, None, Case("params", 3, "eager").config("params")) as engine, torch.no_grad():
        outputs = [engine(torch.ones(2, 16)) for _ in range(3)]
        assert engine.stats.memory.host == engine.stats.memory.shards > 0
    return all(torch.equal(each, expected) for each in outputs)


def test_evaluation(pools: Pools) -> None:
    assert pools(2).run(alone) == [True, True]
