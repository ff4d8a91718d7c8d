"""The program of each rank of `zeroweave demo`: train, check the run against independent figures, and show it.

All ranks do the same; rank 0 prints.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.comm.ledger import Traffic
from zeroweave.comm.process_group import device_of
from zeroweave.demo import measure
from zeroweave.demo.model import Llama
from zeroweave.demo.show import Profile, Result, report
from zeroweave.demo.text import Text
from zeroweave.ranks.start import start_process_group

LEARNING_RATE = 2e-3
CHECKED_STEPS = 3
SAVED_EVERY = 20
DEADLINE_SECONDS = 600.0


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see `zeroweave.cli.demo`. `json`: the path of a file for the figures.

    `save`: a folder of checkpoints.
    """

    stage: int
    steps: int
    lower: str
    eager: bool
    profile: bool
    json: str | None
    save: str | None

    @property
    def way(self) -> str:
        """How modules are run, in one word."""
        return "eager" if self.eager else self.lower

    def config(self, stage: int) -> dict[str, Any]:
        """The engine's config."""
        return {"stage": stage, "compile": {"enabled": not self.eager, "lower": self.lower}}


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
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return zw.initialize(model, optimizer, config=self.settings.config(stage))

    def step(self, engine: zw.Engine, k: int) -> Tensor:
        """One training step; the loss of this rank's part of the batch, detached."""
        return engine.train_step(self.text.step(k))

    def short_run(self, stage: int) -> list[dict[str, Tensor | None]]:
        """The gradients of each of the first steps, and last the parameters after them."""
        seen: list[dict[str, Tensor | None]] = []
        with self.engine(stage) as engine:
            for k in range(CHECKED_STEPS):
                engine.backward(engine(**self.text.step(k)).loss)
                seen.append(dict(engine.gradients()))
                engine.step()
            with engine.full_parameters() as parameters:
                seen.append({name: p.detach().float().cpu().clone() for name, p in parameters.items()})
        return seen

    def train(self, engine: zw.Engine, before: list[float]) -> list[float]:
        """The steps that are left, with a progress bar; the loss of each step, averaged over the ranks.

        `before`: those of the steps that a run has made which was stopped.
        """
        steps, folder = self.settings.steps, self.settings.save
        losses: list[Tensor] = []
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        told = None if console.is_terminal else max(1, steps // 10)  # a bar elsewhere is one line, at the end
        with Progress(
            *columns, TextColumn("loss {task.fields[loss]}"), console=console, disable=self.rank > 0 or told is not None
        ) as bar:
            task = bar.add_task("training", total=steps, completed=len(before), loss="")
            for k in range(len(before), steps):
                losses.append(self.step(engine, k))
                bar.update(task, advance=1, loss=f"{float(losses[-1]):.3f}")
                if told and (k + 1) % told == 0:
                    self.say(f"- step {k + 1} of {steps}, loss {float(losses[-1]):.3f}")
                if folder and (k + 1) % SAVED_EVERY == 0 and k + 1 < steps:  # what is shown needs a step
                    engine.save(folder, client_state={"losses": before + self.means(losses)})
        return before + self.means(losses)

    def means(self, losses: list[Tensor]) -> list[float]:
        """Averaged over the ranks."""
        mean = torch.stack(losses).float()
        dist.all_reduce(mean)
        return [float(loss) for loss in mean / self.world]

    def resume(self, engine: zw.Engine) -> list[float]:
        """Goes on from the latest checkpoint, where there is one; the losses up to it."""
        folder = self.settings.save
        losses: list[float] = engine.load(folder, missing_ok=True).get("losses", []) if folder else []
        if losses:
            self.say(f"going on behind step {len(losses)}, from {folder}")
        if len(losses) >= self.settings.steps:
            raise SystemExit(f"{folder} has {len(losses)} steps already: ask for more with --steps")
        return losses

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def run(self) -> Result:
        began, settings = time.perf_counter(), self.settings
        self.say(f"ZeRO-{settings.stage}, {settings.way}, {self.world} ranks, {self.device.type}")
        self.say(f"comparing stages 1, 2 and 3 with each other and with DDP: {CHECKED_STEPS} steps each")
        runs = {}
        for stage in (1, 2, 3):
            self.say(f"- stage {stage}")
            runs[stage] = self.short_run(stage)
        equal = all(measure.bit_equal(runs[1], runs[stage]) for stage in (2, 3))
        self.say("- DDP")
        reference = measure.ddp_gradients(self.model(), self.text.step(0))
        difference = measure.relative_difference(runs[settings.stage][0], reference)

        with self.engine(settings.stage) as engine:
            start = time.perf_counter()
            before = self.resume(engine)
            self.say(f"training: {settings.steps - len(before)} steps")
            losses = self.train(engine, before)
            training = time.perf_counter() - start
            self.say("counting the collectives of one step")
            engine.reschedule()  # figures are those of one step: no peak of an earlier schedule, no change at its end
            counted = measure.profiled(lambda: self.step(engine, settings.steps))
            stats, schedule, executed = engine.stats, engine.schedule, engine.executed
            assert schedule is not None  # recorded and agreed in the first step
            config = engine.config
            bound = measure.state_bound(engine.buckets, self.rank, settings.stage, _ahead(engine), config.reduce.depth)
            formula = measure.state_scheduled(bound, schedule, engine.buckets)
            mine = {
                "measured": {kind: measure.Count(t.calls, t.payload) for kind, t in stats.last_step.items()},
                "schedule": measure.scheduled(schedule, engine.buckets),
                "independent": counted,
            }
            profiled = self.profile(engine) if settings.profile else None
            return Result(
                stage=settings.stage,
                way=settings.way,
                world=self.world,
                losses=losses,
                seconds_training=training,
                steps_before=len(before),
                seconds=time.perf_counter() - began,
                stages_bit_equal=all(self.gather(equal)),
                difference=max(self.gather(difference)),
                counts=self.gather(mine),
                replayed=all(self.gather(executed == schedule.instructions)),
                memory=self.gather((stats.memory, formula, bound)),
                schedule=schedule,
                stats=stats,
                profile=profiled,
                parameters=sum(slot.numel for bucket in engine.buckets for slot in bucket.slots),
            )

    def profile(self, engine: zw.Engine) -> Profile:
        """The time of a step with communication and without, on the slowest rank, and what it would have sent."""
        self.say("timing steps with communication and without")
        first = self.settings.steps + 1
        ordinary, _ = measure.step_seconds(lambda k: self.step(engine, first + k), self.device)
        with engine.profiling() as planned:
            alone, steps = measure.step_seconds(lambda k: self.step(engine, first + k), self.device)
        sent = {
            kind: Traffic(t.calls // steps, t.payload // steps, t.wire // steps) for kind, t in planned.totals().items()
        }
        assert engine.schedule is not None
        planned_by = measure.scheduled(engine.schedule, engine.buckets)
        return Profile(max(self.gather(ordinary)), max(self.gather(alone)), sent, planned_by)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item."""
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items


def main() -> None:
    """Run the demo on this rank, with the settings that are the only argument, as JSON.

    Rank 0 prints the report and, last, one JSON object. The process exits with 1 where a check failed.
    Expects the environment that torchrun sets.
    """
    settings = Settings(**json.loads(sys.argv[1]))
    start_process_group(DEADLINE_SECONDS)
    rank = dist.get_rank()
    result = Demo(settings, device_of(dist.group.WORLD)).run()
    gc.collect()  # DDP holds the group in a cycle, and a group that outlives its end aborts
    dist.destroy_process_group()
    problems = list(result.problems())
    if rank == 0:
        print("\n".join(report(result)))
        line = json.dumps(result.figures())
        if settings.json:
            Path(settings.json).write_text(line + "\n")
        for problem in problems:
            print(f"FAILED: {problem}", flush=True)
        print(line, flush=True)
    if problems:
        raise SystemExit(1)


def _ahead(engine: zw.Engine) -> int:
    """Most buckets that are gathered ahead of the one in use: "auto" limits all memory of a step, not their number."""
    ahead = engine.config.compile.prefetch
    return len(engine.buckets) - 1 if ahead == "auto" else ahead


if __name__ == "__main__":
    main()
