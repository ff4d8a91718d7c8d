"""The program of each rank of `zeroweave demo`: compare the stages with DDP, train, and show the schedule.

All ranks do the same; rank 0 prints.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroweave as zw
from zeroweave.comm.process_group import device_of
from zeroweave.demo.model import Llama
from zeroweave.demo.text import Text
from zeroweave.ranks.start import start_process_group
from zeroweave.report.tables import size, table

LEARNING_RATE = 2e-3
DIFFERENCE: Final = 1e-5
"""The most by which a gradient may differ from DDP's, as a share of its norm."""
_COMPARED_STEPS: Final = 3
_DEADLINE_SECONDS: Final = 600.0
_LAST: Final = 10
"""The final loss is the mean of this many steps, because one batch is noisy."""
_SHOWN: Final = "layers.1"
"""The block whose schedule is printed: one with neighbours on both sides."""

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Settings:
    """The command's options; see `zeroweave.cli.demo`."""

    stage: int
    steps: int
    lower: str
    eager: bool


@dataclass(frozen=True)
class StageRun:
    """A few steps of one stage: gradients of each step and the parameters after them, and the schedule's collectives.

    `state`, `flats`: bytes of shards, optimizer state and gradients, and of gathered parameters, at most.
    """

    tensors: tuple[Tensors, ...]
    collectives: Mapping[str, int]
    state: int
    flats: int


class Demo:
    """One rank of the demo."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.text = Text(rank=self.rank, world=self.world, device=device)

    def model(self) -> nn.Module:
        """A new model, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        return Llama().to(self.device)

    def engine(self, stage: int) -> zw.Engine:
        """A new engine, with a new model."""
        model, settings = self.model(), self.settings
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        config = {"stage": stage, "compile": {"enabled": not settings.eager, "lower": settings.lower}}
        return zw.initialize(model, optimizer, config=config)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, item: Any) -> list[Any]:
        """The item of every rank."""
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items

    def short_run(self, stage: int) -> StageRun:
        """The first steps of a stage."""
        seen: list[Tensors] = []
        with self.engine(stage) as engine:
            for k in range(_COMPARED_STEPS):
                engine.backward(engine(**self.text.step(k)).loss)
                seen.append(dict(engine.gradients()))
                engine.step()
            memory, schedule = engine.stats.memory, engine.schedule  # before all parameters are gathered
            with engine.full_parameters() as parameters:
                seen.append({name: p.detach().float().cpu().clone() for name, p in parameters.items()})
        assert schedule is not None  # recorded and agreed in the first step
        collectives = Counter(kind for kind, _ in schedule.collectives())
        return StageRun(tuple(seen), collectives, memory.device + memory.gradients, memory.flats_peak)

    def ddp_gradients(self) -> dict[str, Tensor]:
        """The gradients of the first batch, by DistributedDataParallel."""
        model = self.model()
        wrapped = DistributedDataParallel(model)  # it reduces while it lives
        wrapped(**self.text.step(0)).loss.backward()
        return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}

    def compare(self) -> dict[str, Any]:
        """Print the stages next to each other and next to DDP. The figures of that comparison."""
        self.say(f"{_COMPARED_STEPS} steps of stages 1, 2 and 3, and DDP's gradients, from the same seed")
        runs = {stage: self.short_run(stage) for stage in (1, 2, 3)}
        reference = self.ddp_gradients()
        rows, equal, worst = [], True, 0.0
        for stage, run in runs.items():
            same = all(self.gather(bit_equal(run.tensors, runs[1].tensors)))
            difference = max(self.gather(relative_difference(run.tensors[0], reference)))
            equal, worst = equal and same, max(worst, difference)
            calls = (run.collectives[kind] for kind in ("all_gather", "reduce_scatter"))
            against = "every bit equal" if same else "NOT EQUAL"
            rows.append((f"stage {stage}", f"{difference:.1e}", against, *calls, size(run.state), size(run.flats)))
        head = ("", "off DDP by", "against stage 1", "gathers", "reductions", "state of a rank", "gathered at most")
        self.say("\n".join(["", *table(head, rows), ""]))
        return {"stages_bit_equal": equal, "grad_rel_diff_vs_ddp": worst}

    def train(self, engine: zw.Engine) -> list[float]:
        """The losses of all steps, averaged over the ranks."""
        steps, losses = self.settings.steps, list[Tensor]()
        for k in range(steps):
            losses.append(engine.train_step(self.text.step(k)))
            if (k + 1) % max(1, steps // 10) == 0:
                self.say(f"- step {k + 1} of {steps}, loss {float(losses[-1]):.3f}")
        mean = torch.stack(losses).float()
        dist.all_reduce(mean)
        return [float(loss) for loss in mean / self.world]

    def run(self) -> dict[str, Any]:
        """The figures, once everything is printed."""
        began, settings = time.perf_counter(), self.settings
        way = "eager" if settings.eager else settings.lower
        self.say(f"ZeRO-{settings.stage}, {way}, {self.world} ranks, {self.device.type}")
        compared = self.compare()
        with self.engine(settings.stage) as engine:
            start = time.perf_counter()
            self.say(f"training: {settings.steps} steps")
            losses = self.train(engine)
            training = time.perf_counter() - start
            engine.reschedule()  # the next step follows its schedule to the end
            engine.train_step(self.text.step(settings.steps))
            stats, schedule, executed = engine.stats, engine.schedule, engine.executed
            assert schedule is not None  # recorded and agreed in the first step
            first, last, steps = losses[0], fmean(losses[-_LAST:]), len(losses)
            parameters = sum(slot.numel for bucket in engine.buckets for slot in bucket.slots)
            milliseconds = 1e3 * training / steps
            took = f"{training:.1f} s ({milliseconds:.0f} ms a step)"
            block = [f"  {line}" for line in schedule.of(_SHOWN)]
            lines = [
                "",
                f"loss {first:.2f} -> {last:.2f} in {steps} steps, {took}, {parameters:,} parameters",
                "",
                f"schedule of {_SHOWN} ({len(block)} lines of a step's {len(schedule.instructions)} instructions)",
                *block,
                "",
                f"calls: {stats.compiled_calls} compiled, {stats.eager_calls} eager; "
                f"gathers on demand: {stats.on_demand_unshards}",
                "",
            ]
            self.say("\n".join(lines))
            figures: dict[str, Any] = {
                "loss_first": round(first, 4),
                "loss_last": round(last, 4),
                **compared,
                "steps": steps,
                "seconds_training": round(training, 2),
                "stage": settings.stage,
                "ranks": self.world,
                "lower": way,
                "parameters": parameters,
                "replayed": all(self.gather(executed == schedule.instructions)),
                "collectives": {kind: traffic.calls for kind, traffic in stats.last_step.items()},
                "compiled_calls": stats.compiled_calls,
                "eager_calls": stats.eager_calls,
                "on_demand_unshards": stats.on_demand_unshards,
            }
        return {**figures, "seconds": round(time.perf_counter() - began, 2), "ok": not problems(figures)}


def problems(figures: Mapping[str, Any]) -> list[str]:
    """Every check that failed, in words; none for a good run. The loss is reported, not checked."""
    failed = {
        "stages 1, 2 and 3 did not give bit-equal gradients and parameters": not figures["stages_bit_equal"],
        f"a gradient differs from DDP's by {figures['grad_rel_diff_vs_ddp']:.1e} of its norm, more than "
        f"{DIFFERENCE:.0e}": not figures["grad_rel_diff_vs_ddp"] <= DIFFERENCE,
        "the executed instructions are not the schedule's": not figures["replayed"],
    }
    return [problem for problem, holds in failed.items() if holds]


def relative_difference(ours: Tensors, reference: Mapping[str, Tensor]) -> float:
    """The largest of ‖ours − reference‖ / ‖reference‖ over the parameters; infinite where one side has no gradient."""
    found = {name: gradient for name, gradient in ours.items() if gradient is not None}
    if found.keys() != reference.keys():
        return float("inf")
    return max(float((found[k] - each).norm() / each.norm().clamp_min(1e-30)) for k, each in reference.items())


def bit_equal(one: tuple[Tensors, ...], other: tuple[Tensors, ...]) -> bool:
    """True if two runs' tensors are equal in every bit: a NaN equals itself, and 0 does not equal -0."""

    def same(mine: Tensor | None, theirs: Tensor | None) -> bool:
        if mine is None or theirs is None:
            return mine is theirs
        return torch.equal(mine.view(torch.int32), theirs.view(torch.int32))

    return all(
        a.keys() == b.keys() and all(same(a[name], b[name]) for name in a) for a, b in zip(one, other, strict=True)
    )


def main() -> None:
    """Run the demo on this rank, in torchrun's environment. The only argument is the settings, as JSON.

    Rank 0 prints the report and, last, the figures as one JSON object. The process exits with 1 where a check failed.
    """
    settings = Settings(**json.loads(sys.argv[1]))
    start_process_group(_DEADLINE_SECONDS)
    rank = dist.get_rank()
    figures = Demo(settings, device_of(dist.group.WORLD)).run()
    gc.collect()  # DDP holds the group in a cycle, and a group that outlives its end aborts
    dist.destroy_process_group()
    failed = problems(figures)
    if rank == 0:
        for problem in failed:
            print(f"FAILED: {problem}", flush=True)
        print(json.dumps(figures), flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
