"""`zeroweave schedule`: saved schedules, scripts on several ranks, and traces."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.schedule.measured import as_predicted, with_costs
from tests.support.commands import zeroweave
from tests.support.schedules import stack_facts, stack_with_needs
from zeroweave import EngineError, Schedule, cli
from zeroweave.engine.samples import FOLDER, STEPS, Samples
from zeroweave.report.course import NAMES, trace
from zeroweave.schedule import Update, compile_schedule

TRAINS = """
import sys, torch, zeroweave as zw
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"stage": 3, "compile": {"enabled": False}}
engine = zw.initialize(model, optimizer, config=config)
print(sys.argv[1:])
if "--fail" in sys.argv:
    raise ValueError("no such luck")
while True:
    engine.train_step(torch.ones(2, 8), lambda y, _: y.square().mean())
    if "--once" in sys.argv:
        break
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(TRAINS)
    return path


@pytest.fixture
def schedule() -> Schedule:
    """One with something in each lane."""
    return compile_schedule(stack_with_needs(4, 1), replace(stack_facts(4, 1), offload=True))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["schedule", *map(str, arguments)])


def without_breaks(text: str) -> str:
    """What an error's frame says, wherever it breaks lines and names."""
    return "".join(text.replace("│", "").split())


def lanes(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """A trace's slices by the names of their process and thread."""
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lane = names[event["pid"], None], names[event["pid"], event["tid"]]
            found.setdefault(lane, []).append(event)
    return found


# ---------------------------------------------------------------------- saved schedules
def test_a_saved_schedule_without_times(tmp_path: Path, schedule: Schedule) -> None:
    path = tmp_path / "saved.json"
    schedule.save(path)
    done = invoke(path)
    assert done.exit_code == 0, done.output
    assert all(schedule.describe(each) in done.output for each in schedule.instructions)
    assert "no times" in done.output and "predicted" not in done.output
    refused = invoke(path, "--trace", tmp_path / "trace.json")
    assert refused.exit_code == 2 and "hasnotimes" in without_breaks(refused.output)
    assert not (tmp_path / "trace.json").exists()


def test_a_saved_schedule_with_costs(tmp_path: Path, schedule: Schedule) -> None:
    path = tmp_path / "saved.json"
    with_costs(schedule).save(path)
    done = invoke(path, "--trace", tmp_path / "trace.json")
    assert done.exit_code == 0, done.output
    assert "predicted: start" in done.output and "critical path" in done.output and "measured" not in done.output
    found = lanes(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert set(found) == {("predicted", lane) for lane in NAMES.values()}


def test_what_is_no_saved_schedule(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    done = invoke(path)
    said = without_breaks(done.output)
    assert done.exit_code == 2 and "other.json" in said and "version" in said
    path.write_text("{")
    assert invoke(path, "--more").exit_code == 2
    assert invoke(tmp_path / "nowhere.json").exit_code == 2


def test_the_trace_holds_every_span_wait_and_byte(tmp_path: Path, schedule: Schedule) -> None:
    from zeroweave.report.course import Courses

    path = tmp_path / "saved.json"
    as_predicted(with_costs(schedule), before=10_000).save(path)
    shown = Courses.load(path)
    made = json.loads(json.dumps(trace(shown.schedule, shown.courses)))
    events = made["traceEvents"]

    def is_update(index: int) -> bool:
        return isinstance(shown.schedule.instructions[index], Update)

    for course in shown.courses:
        for name in NAMES.values():
            slices = lanes(events)[course.name, name]
            took = sum(e["dur"] for e in slices if e["cat"] != "wait")
            spans = [s for s in course.spans if NAMES["update" if is_update(s.index) else s.lane] == name]
            assert took == pytest.approx(1e6 * sum(s.stop - s.start for s in spans))
        waits = [e for e in lanes(events)[course.name, "computation"] if e["cat"] == "wait"]
        assert sum(e["dur"] for e in waits) == pytest.approx(1e6 * course.exposed) and waits
        # Slices of one lane do not overlap: a lane does one thing at a time.
        for slices in (found for (process, _), found in lanes(events).items() if process == course.name):
            ordered = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices)
            assert all(stop <= start + 1e-3 for (_, stop), (start, _) in pairwise(ordered))
    counters = [e for e in events if e["ph"] == "C"]
    measured, predicted = ([e["args"]["bytes"] for e in counters if e["pid"] == pid] for pid in (1, 2))
    assert measured == predicted and max(measured) > 0
    times = [e["ts"] for e in events if "ts" in e]
    assert times == sorted(times)


# ---------------------------------------------------------------------- scripts
@pytest.mark.matrix
def test_a_script_on_two_ranks(tmp_path: Path, script: Path) -> None:
    out = tmp_path / "trace.json"
    done = zeroweave("schedule", script, "--lr", 3, "--rank", 1, "--steps", 8, "--trace", out, "--", "--ranks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['--lr', '3', '--ranks']") == 2
    assert "Run 3 backward" in done.stdout
    totals = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    measured, predicted = map(float, totals["step"][-2:])
    assert measured > 0 and predicted > 0
    assert "schedule 0." in done.stdout
    found = lanes(json.loads(out.read_text())["traceEvents"])
    ours = set(NAMES.values()) - {"copies"}
    assert set(found) == {(process, lane) for process in ("measured", "predicted") for lane in ours}
    for lane in ("gathers", "reductions"):
        assert sorted(e["name"] for e in found["measured", lane]) == sorted(e["name"] for e in found["predicted", lane])


@pytest.mark.matrix
def test_a_script_that_fails_or_takes_no_step_to_measure(script: Path) -> None:
    failed = zeroweave("schedule", "--ranks", 1, script, "--fail")
    assert failed.returncode == 1 and "no such luck" in failed.stderr and "Traceback (" in failed.stderr
    assert "instruction" not in failed.stdout
    short = zeroweave("schedule", "--ranks", 1, script, "--once")
    assert short.returncode == 1 and "no whole step that followed a schedule" in short.stderr


def test_a_rank_that_is_not_there(script: Path) -> None:
    done = invoke(script, "--rank", 2)
    assert done.exit_code == 2 and "no rank 2 among 2" in done.output


def test_an_engine_is_asked_by_the_environment(tmp_path: Path) -> None:
    assert Samples.asked_for(None, None, None, None, {}) is None  # type: ignore[arg-type]
    assert FOLDER not in os.environ and STEPS not in os.environ
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=f"{FOLDER} must name a folder; .*file/in': Not a directory"):
        Samples.asked_for(None, None, None, None, {FOLDER: str(tmp_path / "file/in")})  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=f"{STEPS} must be a whole number, not 'many'"):
        Samples.asked_for(None, None, None, None, {FOLDER: str(tmp_path), STEPS: "many"})  # type: ignore[arg-type]


@pytest.mark.matrix
def test_a_folder_stands_for_what_a_rank_has_written_there(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "not/there/yet"
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(STEPS, "3")
    run = zeroweave("run", "--nproc", 2, script)
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        shown = [invoke(path, "--rank", rank) for path in (folder, folder / f"rank{rank}.json")]
        assert shown[0].exit_code == 0 and shown[0].output == shown[1].output
    none = invoke(folder, "--rank", 2)
    assert none.exit_code == 2 and "hasnorank2.json:arunwritesrank2.jsonwith" in without_breaks(none.output)


def test_a_log_is_not_run_as_a_script(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("{}\n")
    done = invoke(log)
    assert done.exit_code == 2 and "isalog,whichhasnoschedule" in without_breaks(done.output)
