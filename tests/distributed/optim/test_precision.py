"""Precision: float16 with loss scaling beside torch's scaler, sums in bfloat16 and float32, autocast."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.optim.low_precision import MLP, STAGES, adamw, loss_of, plan, rows_of, settings
from tests.support.harness import Pools
from tests.support.marks import MODES, slow
from tests.support.reference import Expected, Masters, average, build, judge, worst


# ---------------------------------------------------------------------- float16 beside torch's scaler
class Reference:
    """The unsharded model with float32 masters under `torch.amp.GradScaler`, its gradients averaged over the ranks."""

    def __init__(self, dtype: torch.dtype, scaler: dict[str, Any], clipping: float | None = None) -> None:
        self.module = build(MLP)
        initial = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.dtype, self.clipping = dtype, clipping
        self.module.to(dtype)
        self.masters = Masters(self.module)
        for name, _, master in self.masters.pairs:
            master.data.copy_(initial[name])
        self.optimizer = adamw(self.masters.parameters)
        self.scheduler = plan(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", **scaler)
        self.alone = self.skipped = 0

    def step(self, indices: range) -> float:
        """One optimizer step of these micro-steps; returns the scale after it."""
        for index in indices:
            self.scaler.scale(loss_of(self.module, index, self.dtype) / len(indices)).backward()
            self.masters.collect()
        bad = torch.tensor([float(any(not s.isfinite().all() for s in self.masters.sums.values() if s is not None))])
        dist.all_reduce(bad)
        self.alone += bad.item() == 1.0
        self.masters.average()
        self.scaler.unscale_(self.optimizer)
        before = self.scaler.get_scale()
        if self.clipping is not None:
            nn.utils.clip_grad_norm_(self.masters.parameters, self.clipping)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        self.masters.write_back()
        return self.scaler.get_scale()

    def parameters(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, _, master in self.masters.pairs}


def beside_torch(stage: int, mode: str, steps: int, window: int, gas: int, clipping: float | None) -> dict[str, Any]:
    """Both scales after every step, the parameters' difference, and how often a rank overflowed alone."""
    reference = Reference(torch.float16, {"init_scale": 2.0**16, "growth_interval": window}, clipping)
    module = build(MLP)
    optimizer = adamw(list(module.parameters()))
    precision = {"params": "float16", "reduce": "float32", "loss_scale_window": window, "min_loss_scale": 2.0**-20}
    more = {"precision": precision, "gradient_accumulation_steps": gas, "gradient_clipping": clipping}
    scales: tuple[list[float], list[float]] = [], []
    with zw.initialize(module, optimizer, settings(stage, mode, **more), plan(optimizer)) as engine:
        applied = 0
        for step in range(steps):
            indices = range(step * gas, (step + 1) * gas)
            for index in indices:
                engine.backward(loss_of(engine, index, torch.float32))
                engine.step()
            applied += engine.was_step_applied()
            scales[0].append(engine.loss_scale)
            scales[1].append(reference.step(indices))
            assert engine.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]
        assert (engine.global_steps, engine.skipped_steps) == (applied, reference.skipped)
        assert engine.stats.departures == 0, "a skipped step follows the schedule"
        got = {name: engine.full(name) for name in reference.parameters()}
        return {
            "scales": scales,
            "difference": worst(got, reference.parameters()),
            "bounded": judge(got, Expected.alone(reference.parameters())),
            "alone": reference.alone,
            "skipped": reference.skipped,
        }


@pytest.mark.matrix
@pytest.mark.oldest
def test_the_scale_follows_torchs_for_200_steps(pools: Pools) -> None:
    """Gradients overflow at the initial scale, whenever it has grown too far, and on one rank alone."""
    for found in pools(2).run(beside_torch, 3, "eager", 200, 10, 1, None):
        ours, theirs = found["scales"]
        assert ours == theirs
        assert 8 <= found["alone"] <= found["skipped"] - 5 and max(ours) >= 16 * min(ours), found
        assert found["difference"][0] == 0.0, found["difference"]


@slow("2-aot_eager-1", "3-aot_eager-2")
@pytest.mark.parametrize(
    ("stage", "mode", "gas"),
    rows_of([(1, "eager", 2), (2, "aot_eager", 1), (3, "aot_eager", 2)], STAGES, MODES, (1, 2)),
)
def test_float16_is_bit_equal_on_all_stages(pools: Pools, stage: int, mode: str, gas: int) -> None:
    for found in pools(2).run(beside_torch, stage, mode, 16, 4, gas, None):
        assert found["scales"][0] == found["scales"][1] and found["skipped"] >= 2
        assert found["difference"][0] == 0.0, found["difference"]


@slow("3-aot_eager")
@pytest.mark.parametrize(("stage", "mode"), rows_of([(2, "eager"), (3, "aot_eager")], STAGES, MODES))
def test_clipping_sees_gradients_without_the_scale(pools: Pools, stage: int, mode: str) -> None:
    for found in pools(2).run(beside_torch, stage, mode, 12, 4, 1, 0.5):
        assert found["scales"][0] == found["scales"][1] and found["skipped"] >= 2
        assert found["bounded"][0] <= 1, found["bounded"]


# ---------------------------------------------------------------------- reduction and accumulation
def accumulated(stage: int, mode: str, reduce: str | None, op: str) -> tuple[float, float]:
    """Eight micro-steps of bfloat16 gradients: the differences to their float32 mean and to their float64 mean."""
    gas = 8
    module, plain = build(MLP), build(MLP).to(torch.bfloat16)
    precision = {"params": "bfloat16", "reduce": reduce}
    more = {"precision": precision, "reduce": {"op": op}, "gradient_accumulation_steps": gas}
    wide: dict[str, Tensor] = {}
    masters = Masters(plain)
    with zw.initialize(module, adamw(list(module.parameters())), settings(stage, mode, **more)) as engine:
        for window in range(2):  # the second one follows a schedule
            wide.clear()
            for index in range(gas):
                engine.backward(loss_of(engine, index, torch.float32, 1.0))
                (loss_of(plain, index, torch.bfloat16, 1.0) / gas).backward()
                for name, parameter, _ in masters.pairs:
                    assert parameter.grad is not None
                    wide[name] = wide.get(name, torch.zeros(())) + parameter.grad.double()
                masters.collect()
                if index == gas - 1:
                    got = engine.gradients()
                if window == 1 or index < gas - 1:
                    engine.step()
                else:
                    engine.zero_grad()
            expected = masters.average()
    for value in wide.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return judge(got, Expected(expected, wide)), worst(got, wide)[0]


@slow("1-aot_eager", "3-aot_eager")
@pytest.mark.parametrize(("stage", "mode"), rows_of([(1, "aot_eager"), (2, "eager"), (3, "aot_eager")], STAGES, MODES))
def test_bfloat16_gradients_add_up_in_float32(pools: Pools, stage: int, mode: str) -> None:
    for bounded, _ in pools(2).run(accumulated, stage, mode, "float32", "average"):
        assert bounded[0] <= 1, bounded
    for _, exact in pools(2).run(accumulated, stage, mode, None, "predivide"):
        assert exact <= 2.0**-8, "one rounding to bfloat16 for each reduction"


def near_the_end_of_the_range(op: str, reduce: str | None) -> float:
    """The mean of float16 gradients of 40 000 on both ranks; their sum is infinite in float16."""
    module = nn.Linear(4, 1, bias=False)
    precision = {"params": "float16", "loss_scale": 1, "reduce": reduce}
    config = settings(2, "eager", precision=precision, reduce={"op": op})
    with zw.initialize(module, torch.optim.SGD(module.parameters(), lr=1e-9), config) as engine:
        engine.backward(engine(torch.full((1, 4), 40_000.0)).float().sum())
        gradient = engine.gradients()["weight"]
        assert gradient is not None
        return float(gradient.max())


def test_predivide_and_a_wider_reduction_hold_what_a_sum_does_not(pools: Pools) -> None:
    for op, reduce in (("predivide", None), ("average", "float32"), ("predivide", "float32")):
        assert pools(2).run(near_the_end_of_the_range, op, reduce) == [40_000.0] * 2  # a float16


# ---------------------------------------------------------------------- autocast
def under_autocast(stage: int, mode: str, by_config: bool) -> list[tuple[float, str]]:
    """Gradients under autocast beside those of the unsharded model under autocast."""
    module, plain = build(MLP), build(MLP)
    more = {"precision": {"autocast": "bfloat16"}} if by_config else {}

    def casting() -> Any:
        return contextlib.nullcontext() if by_config else torch.autocast("cpu", torch.bfloat16)

    differences = []
    with zw.initialize(module, adamw(list(module.parameters())), settings(stage, mode, **more)) as engine:
        for index in range(3):
            with casting():
                loss = loss_of(engine, index, torch.float32)
            engine.backward(loss)
            with torch.autocast("cpu", torch.bfloat16):
                out = loss_of(plain, index, torch.float32)
            out.backward()
            expected = average(plain.named_parameters())
            differences.append(judge(engine.gradients(), Expected.alone(expected)))
            assert not torch.is_autocast_enabled("cpu")
            plain.zero_grad()
            engine.zero_grad() if index < 2 else engine.step()
    return differences


@slow("2-aot_eager-False", "3-aot_eager-True")
@pytest.mark.parametrize(
    ("stage", "mode", "by_config"),
    rows_of(
        [(2, "eager", True), (3, "aot_eager", True), (2, "aot_eager", False), (3, "eager", False)],
        STAGES,
        MODES,
        (True, False),
    ),
)
def test_autocast(pools: Pools, stage: int, mode: str, by_config: bool) -> None:
    for differences in pools(2).run(under_autocast, stage, mode, by_config):
        assert max(differences)[0] <= 1, differences


def plainly_backward() -> list[str]:
    """`loss.backward()` under a loss scale is said to be unscaled, once; `engine.scale` is not."""
    module = build(MLP)
    config = settings(2, "eager", precision={"loss_scale": 64})
    with zw.initialize(module, adamw(list(module.parameters())), config) as engine, caught() as told:
        for index in range(3):
            loss = loss_of(engine, index, torch.float32, 1.0)
            (engine.scale(loss) if index == 0 else loss).backward()
            engine.step()
            told.append(f"step {index}")
    return told


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: told.append(str(message))
        yield told


def test_a_plain_backward_under_a_loss_scale_warns_once(pools: Pools) -> None:
    told, elsewhere = pools(2).run(plainly_backward)
    assert [told[0], told[2], told[3], len(told)] == ["step 0", "step 1", "step 2", 4]
    assert told[1].startswith("loss.backward() does not multiply by the loss scale (64); use engine.backward")
    assert elsewhere == ["step 0", "step 1", "step 2"], "rank 0 speaks for all"
