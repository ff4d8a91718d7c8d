"""What `zeroweave plan` says beside what GPUs do: bytes of the state, peak, and the time of a step.

    python -m benchmarks.plan --out out

Measures the machine first, as `zeroweave plan --calibrate` does, or takes `--calibration FILE`. Then for each case
(a model of benchmarks.lm, its sequence and micro-batch) and each stage: plans it, by the data sheet and by what was
measured, and trains it, in fresh processes, one per GPU. The peak is torch.cuda.max_memory_allocated of the steps
behind the warm-up, the step the slowest rank's median. Gathers go by kernel, because plans have no copy engines.

Exit code 1 unless bytes are equal and, on GPUs, peaks within 10 % and calibrated times within 15 %. `--set` changes the
config of both, for instance offload.optimizer=all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import launch, report
from benchmarks.lm import overrides
from benchmarks.models import SHAPES
from benchmarks.peers.subject import Subject
from benchmarks.peers.zeroweave import configuration, merge
from benchmarks.worker import Spec
from zeroweave.config import Config
from zeroweave.plan.calibrate import measured
from zeroweave.plan.hardware import GPUS, Calibration, Efficiency, Hardware
from zeroweave.plan.plan import adamw
from zeroweave.plan.rank import Measured, PlannedRank

PEAK, STEP = 0.10, 0.15
"""How far a peak and a calibrated time may be from what was measured."""
CASES = ("llama-1b:2048:4", "qwen3-8b:4096:1")
STATE = ("shards", "masters", "optimizer", "host_shards", "host_masters", "host_optimizer")
"""What of the memory is exact."""


@dataclass(frozen=True)
class Row:
    """One case at one stage. GiB and seconds; `peak` 0 where nobody counts. wrong: the state that has other bytes."""

    case: str
    stage: int
    peak: float
    planned_peak: float
    step: float
    by_sheet: float
    calibrated: float
    wrong: tuple[str, ...]

    @property
    def peak_ratio(self) -> float | None:
        """Planned beside measured."""
        return self.planned_peak / self.peak if self.peak else None

    @property
    def step_ratio(self) -> float:
        return self.calibrated / self.step


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--case", action="append", metavar="MODEL:SEQ:MICRO_BATCH", help=f"default: {', '.join(CASES)}")
    p.add_argument("--stages", default="1,2,3")
    p.add_argument("--gas", type=int, default=1, help="micro-steps of an optimizer step")
    p.add_argument("--gpus", type=int, default=None, help="processes; default: all GPUs, or 2 on the CPU")
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--warm", type=int, default=8, help="first steps that are not counted")
    p.add_argument("--lower", choices=["inductor", "aot_eager", "none"], default="inductor")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="zeroweave's config, dotted key")
    p.add_argument("--calibration", type=Path, default=None, help="a file instead of measuring")
    p.add_argument("--out", type=Path, default=None, help="folder for plan.json, plan.md, calibration.json and lm.log")
    p.add_argument("--cache", type=Path, default=None, help="folder of compiler caches to keep")
    p.add_argument("--timeout", type=float, default=240.0, help="seconds for each case and stage")
    return p


def spec_of(case: str, a: argparse.Namespace) -> Spec:
    """What is measured, but for the stage."""
    try:
        model, seq, micro_batch = case.split(":")
        sizes = int(seq), int(micro_batch)
    except ValueError:
        raise SystemExit(f"--case {case}: expected MODEL:SEQ:MICRO_BATCH") from None
    if model not in SHAPES:
        raise SystemExit(f"--case {case}: the models are {', '.join(SHAPES)}")
    config = merge({"transport": {"gathers": "kernel"}}, overrides(a.set))
    return Spec("", model, *sizes, a.steps, a.warm, lower=a.lower, zeroweave=config, gas=a.gas)


def planned(spec: Spec, stage: int, world: int, hardware: Hardware) -> Measured:
    """A step of one rank; its `plan()` is what an engine would follow by itself."""
    subject, config = Subject(SHAPES[spec.model]), Config.load(configuration(stage, (), spec.options()))
    tokens = torch.zeros(spec.micro_batch, spec.seq, dtype=torch.long, device="meta")
    model = subject.on_meta(torch.bfloat16)
    return PlannedRank(model, subject.batch(tokens), adamw, config, world, hardware).measure()


def row(case: str, stage: int, by_sheet: Measured, calibrated: Measured, found: report.Row) -> Row:
    state, seen, plan = asdict(by_sheet.memory), found.details["memory"], calibrated.plan()
    return Row(
        case=case,
        stage=stage,
        peak=found.steady_gib,
        planned_peak=plan.peak / 2**30,
        step=found.step_s,
        by_sheet=by_sheet.plan().seconds,
        calibrated=plan.seconds,
        wrong=tuple(name for name in STATE if state[name] != seen[name]),
    )


def problems(rows: Sequence[Row]) -> list[str]:
    """What should hold and does not. A machine without peaks has no GPUs, and its times are not what is planned."""
    found = []
    for each in rows:
        name = f"{each.case}, stage {each.stage}"
        found += [f"{name}: other bytes of {', '.join(each.wrong)}"] if each.wrong else []
        if (ratio := each.peak_ratio) is None:
            continue
        found += [f"{name}: the peak is {ratio:.3f} of what was measured"] if abs(ratio - 1) > PEAK else []
        if abs(each.step_ratio - 1) > STEP:
            found.append(f"{name}: the time is {each.step_ratio:.3f} of what was measured")
    return found


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| case | stage | state | peak GiB | planned | ratio | step s | by data sheet | ratio | calibrated | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        peak = f"{r.peak:.2f} | {r.planned_peak:.2f} | {r.peak_ratio:.3f}" if r.peak_ratio else "– | – | –"
        lines.append(
            f"| {r.case} | {r.stage} | {'differs' if r.wrong else 'equal'} | {peak} | {r.step:.4f} "
            f"| {r.by_sheet:.4f} | {r.by_sheet / r.step:.3f} | {r.calibrated:.4f} | {r.step_ratio:.3f} |"
        )
    return "\n".join(lines)


def write(out: Path, text: str, rows: Sequence[Row]) -> None:
    result: Mapping[str, Any] = {"rows": [asdict(r) for r in rows], "problems": problems(rows)}
    (out / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "plan.md").write_text(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    if not 0 <= a.warm < a.steps:
        raise SystemExit("--warm must be less than --steps")
    specs = {case: spec_of(case, a) for case in a.case or CASES}
    world = a.gpus or torch.cuda.device_count() or 2
    known = measured(world) if a.calibration is None else Calibration.load(a.calibration)
    print("\n".join(known.lines()), flush=True)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
        known.save(a.out / "calibration.json")
    sheet = GPUS[known.gpu or "h200"]
    rows: list[Row] = []
    failures: list[str] = []
    with ExitStack() as stack:
        scratch = stack.enter_context(launch.temporary_folder())
        log = stack.enter_context(((a.out or scratch) / "lm.log").open("w"))
        for case, spec in specs.items():
            for stage in map(int, a.stages.split(",")):
                plans = [
                    planned(spec, stage, world, Hardware(sheet, share))
                    for share in (Efficiency(), known.efficiency(sheet))
                ]
                own = replace(spec, impl=f"zeroweave-z{stage}")
                try:
                    records = launch.run(own, world, a.timeout, log, a.cache or scratch / "cache")
                except launch.LaunchError as error:
                    failures.append(f"{case}, stage {stage}")
                    print(error, flush=True)
                    continue
                rows.append(row(case, stage, plans[0], plans[1], report.row(own, records)))
                text = f"{world} x {records[0].device}, torch {records[0].torch_version}\n\n{table(rows)}"
                if a.out is not None:  # after each one, so that a later failure costs nothing
                    write(a.out, text, rows)
    if rows:
        print(f"\n{text}")
    missed = [*problems(rows), *(f"{each}: failed" for each in failures)]
    for each in missed:
        print(f"does not hold: {each}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
