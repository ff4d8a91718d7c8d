"""Saved schedules come back equal, and whatever else a file holds is refused with its name and field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.schedule.measured import as_predicted, with_costs
from tests.support.schedules import random_case, stack, stack_facts, with_needs
from zeroweave import Schedule, ScheduleError
from zeroweave.schedule import Event, Instruction, Measured, compile_schedule


def cases() -> list[Schedule]:
    """Schedules that have every instruction and event, with and without costs."""
    made = []
    for seed in range(24):
        record, facts = random_case(seed)
        keep = "auto" if seed % 3 == 0 else frozenset({0}) if seed % 3 == 1 else frozenset[int]()
        if seed % 4 == 3:
            trained = frozenset(b.id for b in facts.buckets if b.trainable)
            facts = replace(facts, replicated=trained, spread=trained)
        facts = replace(facts, free=seed % 2 == 0, keep=keep, memory=seed or None, stage=seed % 3 == 0)
        if seed % 2:
            record, facts = with_needs(record, random.Random(seed)), replace(facts, offload=True)
        schedule = compile_schedule(record, facts)
        made.append(with_costs(schedule, seed) if seed % 5 else schedule)
    return made


def test_a_loaded_schedule_is_the_saved_one(tmp_path: Path) -> None:
    path, kinds = tmp_path / "schedule.json", set()
    for schedule in cases():
        schedule.save(path)
        loaded = Schedule.load(path)
        assert loaded == schedule
        assert (loaded.fingerprint, loaded.shape) == (schedule.fingerprint, schedule.shape)
        kinds |= {type(each) for each in (*schedule.instructions, *schedule.record)}
    assert kinds == {*get_args(Instruction), *get_args(Event)}


def test_a_measured_step_is_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    for schedule in cases():
        schedule.save(path)
        assert Measured.load(path) is None
        if schedule.costs is not None:
            found = as_predicted(schedule, before=1000)
            found.save(path)
            assert Measured.load(path) == found
            assert Schedule.load(path) == schedule


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """An edit of the file's text by a change of what it says."""

    def edited(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return edited


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (edit(lambda file: file.update(version=2)), "version is 2; this zeroweave reads version 5 only"),
        (edit(lambda file: file.pop("version")), "version: Field required"),
        (edit(lambda file: file.pop("facts")), "facts: Field required"),
        (edit(lambda file: file["facts"].pop("depth")), "facts.depth: Field required"),
        (edit(lambda file: file["facts"].update(depth=0)), "facts: depth must be at least 1"),
        (edit(lambda file: file["facts"]["buckets"][1].update(id=0)), "facts: two buckets have the same id"),
        (edit(lambda file: file["facts"].update(prefetch="far")), "facts.prefetch"),
        (edit(lambda file: file["facts"]["costs"]["update"].update(x=1.0)), "facts.costs.update"),
        (edit(lambda file: file["record"][0].update(uses="0")), "record.0.Entered.uses"),
        (edit(lambda file: file["instructions"][3].update(kind="Fly")), "instructions.3"),
        (edit(lambda file: file["instructions"].append(7)), "instructions.19"),
        (edit(lambda file: file["instructions"][0].update(bucket="0")), "instructions.0.Unshard.bucket"),
        (
            edit(lambda file: file["instructions"].pop(1)),
            "instruction 1, Run layers.0.0 forward [layers.0]: layers.0 is",
        ),
        (edit(lambda file: file["measured"]["steps"][0]["moments"].pop()), "steps.0.moments: 18 for 19 instructions"),
        (edit(lambda file: file["measured"]["steps"].clear()), "measured.steps"),
        (edit(lambda file: file["measured"].pop("costs")), "measured.costs: Field required"),
        (lambda text: text[:-20], "not a saved schedule: the file: Invalid JSON"),
        (lambda text: "[]", "not a saved schedule: the file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, spoil: Callable[[str], str], said: str) -> None:
    path = tmp_path / "spoilt.json"
    schedule = with_costs(compile_schedule(stack(2, 1, 1), stack_facts(2, 0)))
    assert len(schedule.instructions) == 19
    as_predicted(schedule).save(path)
    assert Measured.load(path) is not None
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ScheduleError) as raised:
        Measured.load(path)
    assert str(raised.value).startswith(f"[ZW703] {path}: ") and said in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"nowhere\.json: cannot be read: No such file"):
        Schedule.load(tmp_path / "nowhere.json")
