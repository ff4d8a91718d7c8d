"""States of few bits in engines: all stages have the same, they are saved and loaded as float32, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.optim.low_precision import MLP, STAGES, loss_of, settings
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from tests.support.reference import build

COMPACT = {"params": "bfloat16", "optimizer": "compact"}
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 0.05},
    "accumulated": {"gradient_accumulation_steps": 2},
    "skipping": {"on_nonfinite": "skip"},
}
KEYS = ("param", "exp_avg", "exp_avg_sq")


def make(stage: int, mode: str = "eager", precision: dict[str, Any] = COMPACT, **more: Any) -> zw.Engine:
    model = build(MLP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return zw.initialize(model, optimizer, settings(stage, mode, precision=precision, **more))


def train(engine: zw.Engine, steps: int, factors: dict[int, float] | None = None) -> list[float]:
    losses = []
    for _ in range(steps * engine.config.gradient_accumulation_steps):
        index = engine.micro_steps
        loss = loss_of(engine, index, torch.float32, (factors or {}).get(index, 1.0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: zw.Engine) -> dict[str, Tensor]:
    names = [name for name, _ in engine.module.named_parameters()]
    found = {f"{name} {key}": engine.full(name, key) for name in names for key in KEYS}
    return {key: value.clone() for key, value in found.items() if value is not None}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 10
    return [name for name in one if not torch.equal(one[name], other[name])]


# ---------------------------------------------------------------------- stages and worlds
def stages(mode: str, more: str) -> list[str]:
    """What differs between stages; a step whose gradients are infinite is skipped where that is asked for."""
    runs: dict[int, dict[str, Tensor]] = {}
    for stage in STAGES[1:] if more == "accumulated" else STAGES:  # stage 1 adds up in another order
        with make(stage, mode, **MORE[more]) as engine:
            losses = train(engine, 6, {3: float("inf")} if more == "skipping" else None)
            assert engine.skipped_steps == (more == "skipping")
            numel = sum(bucket.shard_numel for bucket in engine.buckets)
            memory = engine.stats.memory
            assert (memory.shards, memory.masters) == (0, 3 * numel)
            assert 0 <= memory.optimizer - (2 * numel + 8 * numel // 64) <= 4 * 50, "codes, scales and step counters"
            runs[stage] = {"losses": torch.tensor(losses), **everything(engine)}
    return [f"stage {stage}: {name}" for stage, run in runs.items() for name in differing(runs[3], run)]


@daily(
    ("mode", "more"),
    [("eager", "clipped")],
    [(mode, more) for mode in MODES for more in MORE if (mode, more) != ("eager", "clipped")],
)
def test_every_stage_has_the_same(pools: Pools, mode: str, more: str) -> None:
    assert pools(2).run(stages, mode, more) == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("more", ["plain", "skipping"])
def test_every_stage_has_the_same_on_other_worlds(pools: Pools, world: int, more: str) -> None:
    assert pools(world).run(stages, "aot_eager", more) == [[]] * world


# ---------------------------------------------------------------------- to and fro
def saved(folder: Path, kind: str) -> dict[str, Tensor]:
    with make(3, precision=COMPACT if kind == "compact" else {"params": "bfloat16"}) as engine:
        train(engine, 4)
        engine.save(folder)
        return everything(engine)


def loaded(folder: Path, kind: str, stage: int) -> dict[str, Tensor]:
    with make(stage, precision=COMPACT if kind == "compact" else {"params": "bfloat16"}) as engine:
        train(engine, 1)
        engine.load(folder)
        values = everything(engine)
        assert all(torch.isfinite(torch.tensor(train(engine, 2))))
        return values


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """What is not the same, up to what codes lose: 1/127 of a root, 1/255 of a fourth root, 8 bits of a master."""
    found = []
    for name, value in one.items():
        power = 1.0 if name.endswith("param") else 0.25 if name.endswith("sq") else 0.5
        mine, theirs = (each[name].abs() ** power for each in (one, other))
        limit = 2.0**-16 * value.abs() if power == 1 else mine.max() / (250 if power == 0.25 else 125)
        if bool(((mine - theirs).abs() > limit).any()):
            found.append(name)
    return found


@daily("world", [], [1, 2, 3])
def test_checkpoints_of_both_kinds_are_the_same(pools: Pools, tmp_path: Path, world: int) -> None:
    """From compact to any number of ranks and to full nothing is rounded; from full to compact once."""
    compact, full = (pools(2).run(saved, tmp_path / kind, kind)[0] for kind in ("compact", "full"))
    assert differing(pools(world).run(loaded, tmp_path / "compact", "compact", 1)[0], compact) == []
    assert differing(pools(world).run(loaded, tmp_path / "compact", "full", 2)[0], compact) == []
    found = pools(world).run(loaded, tmp_path / "full", "compact", 2)[0]
    assert far(full, found) == [] and differing(full, found) != []


def crossed(folder: Path, saved_with: str, loaded_with: str, asynchronous: bool) -> list[str]:
    """What differs two steps behind a checkpoint, with and without it, where states are on the device or away."""
    with make(3, offload={"optimizer": saved_with}) as engine:
        train(engine, 4)
        engine.save(folder, asynchronous=asynchronous)
        train(engine, 2)
        wanted = everything(engine)
    with make(2, offload={"optimizer": loaded_with}) as engine:
        train(engine, 1)
        engine.load(folder)
        train(engine, 2)
        return differing(wanted, everything(engine))


@daily(
    ("saved_with", "loaded_with", "asynchronous"),
    [("all", "none", True), ("none", "all", False)],
    [("all", "none", False), ("all", "all", True)],
)
def test_runs_go_on_wherever_states_were(
    pools: Pools, tmp_path: Path, saved_with: str, loaded_with: str, asynchronous: bool
) -> None:
    assert pools(2).run(crossed, tmp_path, saved_with, loaded_with, asynchronous) == [[], []]


def passed_on() -> list[str]:
    """What comes back from profiling(), from state dicts, and from the next engine."""
    engine = make(2)
    train(engine, 3)
    before = everything(engine)
    with engine.profiling():
        train(engine, 2)
    found = [f"profiling: {name}" for name in differing(everything(engine), before)]
    state = engine.optimizer.state_dict()
    train(engine, 1)
    engine.set_full(first(engine), torch.zeros_like(before[f"{first(engine)} exp_avg"]), "exp_avg")
    assert not engine.full(first(engine), "exp_avg").any()
    engine.optimizer.load_state_dict(state)
    now = everything(engine)
    found += [f"state dict: {name}" for name in differing(now, before) if "param" not in name]
    module, optimizer = engine.module, engine.optimizer
    engine.destroy()
    kinds = {value.dtype for held in optimizer.state.values() for key, value in held.items() if key != "step"}
    assert kinds == {torch.float32}, "the optimizer has ordinary states again"
    with zw.initialize(module, optimizer, settings(3, "eager", precision=COMPACT)) as engine:
        return found + [f"again: {name}" for name in differing(everything(engine), now) if "param" not in name]


def first(engine: zw.Engine) -> str:
    return next(name for name, p in engine.module.named_parameters() if p.numel() > 64)


def test_states_are_passed_on(pools: Pools) -> None:
    assert pools(2).run(passed_on) == [[], []]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        settings = {"precision": {"params": "bfloat16", "optimizer": "compact"}, "compile": {"enabled": False}}
        with zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), settings) as engine:
            x = torch.linspace(-1, 1, 64, dtype=torch.bfloat16).view(8, 8)
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                for _ in range(3):
                    engine.backward(engine(x).float().square().mean())
                    engine.step()
                keys = ("param", "exp_avg", "exp_avg_sq")
                return [engine.full(name, key).clone() for name, _ in engine.module.named_parameters() for key in keys]
            finally:
                torch.set_default_dtype(before)

    assert all(torch.equal(a, b) for a, b in zip(run(torch.float32), run(default), strict=True))


@pytest.mark.filterwarnings("ignore:what requires gradients and is in no group")
def test_masters_that_no_adam_updates_keep_their_bits() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(3)))
    before = model[1][0].weight.detach().clone()
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()])
    with zw.initialize(model, optimizer, settings(3, "eager", precision=COMPACT)) as engine:
        assert torch.equal(engine.full("1.0.weight"), before)


# ---------------------------------------------------------------------- what is refused
def refused() -> None:
    for optimizer, precision, words in [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), COMPACT, "AdamW, and not for SGD"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), COMPACT, "its group 0 has amsgrad: .* has to be False"),
        (lambda p: [torch.optim.Adam(p[:1]), torch.optim.AdamW(p[1:])], COMPACT, "not for Several"),
        (lambda p: torch.optim.Adam(p), {"optimizer": "compact"}, "set precision.params to 'bfloat16'"),
        (lambda p: None, COMPACT, "there is no optimizer"),
        (lambda p: None, {"optimizer": "compact"}, "set precision.params to 'bfloat16'"),
    ]:
        model = build(MLP)
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(zw.ParameterError, match=words):
            zw.initialize(model, optimizer(list(model.parameters())), settings(3, "eager", precision=precision))
        assert [p.data_ptr() for p in model.parameters()] == before and isinstance(model, nn.Module)


def refused_later(folder: Path) -> list[str]:
    """What has changed where a checkpoint, a state dict and a live change bring an option that codes cannot have."""
    model = build(MLP)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with zw.initialize(model, optimizer, settings(3, "eager", precision={"params": "bfloat16"})) as engine:
        train(engine, 2)
        engine.save(folder)
        state = engine.optimizer.state_dict()
    with make(3) as engine:
        train(engine, 1)
        before, steps = everything(engine), engine.micro_steps
        words = "group 0 has amsgrad: with precision.optimizer 'compact'"
        for strict in (True, False):
            with pytest.raises(zw.CheckpointError, match=f"nothing was loaded: its optimizer's {words}"):
                engine.load(folder, strict=strict)
        with pytest.raises(zw.EngineError, match=f"nothing was loaded: its {words}"):
            engine.optimizer.load_state_dict(state)
        (group,) = engine.optimizer.param_groups
        assert not group["amsgrad"] and engine.micro_steps == steps
        group["amsgrad"] = True
        engine.backward(loss_of(engine, 0, torch.float32, 1.0))
        with pytest.raises(zw.ParameterError, match=f"nothing was updated: the optimizer's {words}"):
            engine.step()
        engine.zero_grad()
        found = differing(everything(engine), before)
        group["amsgrad"] = False
        train(engine, 1)
        assert len(differing(everything(engine), before)) > 10
        return found


def test_what_cannot_be_compact_is_refused_later_too(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(refused_later, tmp_path) == [[], []]


def test_what_cannot_be_compact_is_refused_before_anything_changes(pools: Pools) -> None:
    pools(2).run(refused)
