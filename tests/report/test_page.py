"""The page of a report, as text: what it says of a run, what it says where little is known, and how large it is."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import pytest
import torch

import zeroweave as zw
from tests.report.runs import about, measured, schedule_of
from tests.schedule.measured import as_predicted, with_costs
from tests.support.marks import daily
from tests.support.schedules import random_case, with_needs
from zeroweave import ScheduleError
from zeroweave.engine.samples import FOLDER, About
from zeroweave.report.course import Courses
from zeroweave.report.page import page
from zeroweave.schedule import Measured, compile_schedule

MADE = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)


def written(found: Measured, folder: Path, title: str = "train.py") -> str:
    """The page of a run, by way of its file."""
    path = folder / "run.json"
    found.save(path)
    return page(Courses.load(path), title, MADE)


def words(text: str) -> str:
    """What a reader sees of a page, or of a piece of it."""
    shown = re.sub(r"<(style|script)>.*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


def section(text: str, name: str) -> str:
    (found,) = re.findall(rf'<section id="{name}"(.*?)</section>', text, flags=re.DOTALL)
    return words(f"<section{found}")


def test_what_a_run_tells_is_on_the_page(tmp_path: Path) -> None:
    found = measured(4, 1, about(4))
    text = written(found, tmp_path)
    shown = words(text)
    assert "Llama, 147,456 parameters in 4 buckets" in shown and "2030-01-02 03:04 UTC" in shown
    assert "ZeRO stage 3 on 2 ranks · as rank 0 saw it, on cuda:0, an accelerator" in shown
    schedule = found.step.schedule
    assert all(schedule.describe(each) in shown for each in schedule.instructions)
    for step, name in zip((found.step, *found.others), ("median", "fastest", "slowest"), strict=True):
        assert f"{name}, {1e3 * step.seconds:.3f} ms" in shown
    assert "predicted step" in shown and "critical path" in shown
    gathers = sum(each.seconds for each in found.step.operations if each.kind == "all_gather")
    assert f"{1e3 * gathers:.3f}" in section(text, "communication")
    assert "by copy engine from 4 MiB on: they cost least" in section(text, "communication")
    assert "layers.3.mlp.down.weight 64 × 64" in section(text, "buckets") and "bfloat16" in section(text, "buckets")
    assert "lower 9.250" in section(text, "compilation") and "calls that ran compiled 720" in section(
        text, "compilation"
    )
    assert "shards, in the dtype of the computation 1.00 GiB" in section(text, "memory")
    eager = section(text, "eager")
    assert "2 regions run eagerly: layers.* call of unsupported function breaks the graph." in eager
    assert "'embed', 'head'" in eager and "compile.cuda_graphs is false" in eager
    assert "Not launched as a graph: 2 calls the calls are others" in eager
    config = section(text, "config")
    assert "key value gradient_clipping 1.5 default: none" in config, "what is not as by default comes first"
    assert "PyTorch 2.13.0" in config and "reduce.depth 2" in config
    steps = section(text, "steps")
    assert "Duration of each timed step, from 0 to 125 ms step 2 step 29" in steps and "2 125 " in steps
    assert "Loss on this rank, from 0 to 5 step 1 step 29" in steps and "1 5 2 3.5 3 3 " in steps


def test_the_computation_waits_for_what_is_named(tmp_path: Path) -> None:
    found = measured(4, 1)
    schedule, waits = found.step.schedule, found.step.waits
    index = max(
        (i for i in waits if schedule.describe(schedule.instructions[i]).startswith("Wait")), key=waits.__getitem__
    )
    (cause,) = (
        each
        for each in found.step.operations
        if each.bucket == schedule.instructions[index].bucket  # type: ignore[union-attr]
        and each.index < index
        and each.exposed == pytest.approx(waits[index])
    )
    said = section(written(found, tmp_path), "time")
    assert f"{index} {schedule.describe(schedule.instructions[index])} {1e3 * waits[index]:.3f}" in said
    assert f"96.00 MiB behind {cause.after}" in said


def test_names_cannot_leave_their_place(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"'"
    known = about(2)
    spoilt = replace(known.stats, eager_regions={evil: evil}, gathers=evil, eager_modules=(evil,))
    buckets = tuple(
        replace(b, name=evil, slots=tuple(replace(slot, name=evil) for slot in b.slots)) for b in known.buckets
    )
    told = replace(known, stats=spoilt, model=evil, device=evil, versions={evil: evil}, buckets=buckets)
    found = measured(2, 1, told)
    step = found.step
    facts = step.schedule.facts
    renamed = replace(facts, buckets=tuple(replace(each, name=f"{evil}{each.id}") for each in facts.buckets))
    schedule = replace(step.schedule, facts=renamed)
    text = written(replace(found, step=replace(step, schedule=schedule)), tmp_path, title=evil)
    assert "<script>alert" not in text and text.count("<script>") == 1
    assert words(text).count(evil) > 10, "and it is shown as it is"
    assert not re.search(r"<[^>]*\balert\b", text), "nor is it in any tag"


def test_nothing_is_asked_of_a_network(tmp_path: Path) -> None:
    text = written(measured(2, 1, about(2)), tmp_path)
    addresses = re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?([^"')\s>]+)""", text)
    assert addresses and all(each.startswith("#") or each == "data:," for each in addresses)
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_each_anchor_is_there_once(tmp_path: Path) -> None:
    text = written(measured(3, 1, about(3)), tmp_path)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(ids)


def test_a_large_run_is_less_than_two_megabytes(tmp_path: Path) -> None:
    """36 blocks, three micro-steps in the window, three measured steps beside the prediction."""
    found = measured(36, 3, about(36))
    assert len(found.others) == 2
    text = written(found, tmp_path)
    assert len(text.encode()) < 2_000_000
    assert len(re.findall("<rect", text)) > 4 * 36 * 3 * 5, "every slice is there"


def test_a_schedule_alone(tmp_path: Path) -> None:
    bare = schedule_of(3, 1)
    path = tmp_path / "saved.json"
    replace(bare, facts=replace(bare.facts, costs=None)).save(path)
    said = words(page(Courses.load(path), "saved.json", MADE))
    assert "No times: nothing was measured" in said and "The config is not in this file" in said
    assert "Unshard layers.0" in said and "A saved schedule of 3 buckets" in said
    bare.save(path)
    said = words(page(Courses.load(path), "saved.json", MADE))
    assert "predicted step" in said and "measured step" not in said.lower() and "Waits" not in said
    assert "What was sent is not in this file" in said


def test_losses_that_are_not_finite_are_told_and_not_drawn(tmp_path: Path) -> None:
    known = replace(about(2), losses=((1, math.inf), (2, 4.0), (3, math.nan), (4, 1.0)))
    text = written(measured(2, 1, known), tmp_path)
    assert "Loss on this rank, from 0 to 4 step 1 step 4" in section(text, "steps")
    assert "1 inf 2 4 3 nan 4 1" in section(text, "steps")
    assert 'd="M0 0L1000 75"' in text and "nan" not in "".join(re.findall(r'd="([^"]*)"', text))
    assert "Loss on this rank" not in written(measured(2, 1, replace(known, losses=((1, math.nan),))), tmp_path)


@daily("seed", range(3), range(3, 40))
def test_any_schedule_makes_a_page(tmp_path: Path, seed: int) -> None:
    record, facts = random_case(seed)
    record = with_needs(record, random.Random(seed))
    schedule = with_costs(compile_schedule(record, replace(facts, offload=True)), seed)
    found = as_predicted(schedule, before=5000 * (seed % 2))
    said = words(written(found, tmp_path))
    assert all(schedule.describe(each) in said for each in schedule.instructions)
    assert f"measured step {1e3 * found.step.seconds:.3f} ms" in said


def test_what_nobody_sends_is_not_said_to_be_sent(tmp_path: Path) -> None:
    known = about(2)
    alone = replace(known, world=1, stats=replace(known.stats, last_step={}, total={}))
    assert "This rank has sent nothing." in section(written(measured(2, 1, alone), tmp_path), "communication")
    assert "This rank has sent nothing." not in written(measured(2, 1, known), tmp_path)


def test_one_measured_step_and_no_memory(tmp_path: Path) -> None:
    found = replace(measured(2, 1), others=())
    moments = tuple(replace(each, allocated=0) for each in found.step.moments)
    said = written(replace(found, step=replace(found.step, moments=moments)), tmp_path)
    assert "nobody counts it on this device" in said and 'type="radio"' not in said


def test_what_an_engine_told_is_read_as_it_was() -> None:
    known = about(2)
    assert About.found(known.told(), "run.json") == known
    broken = known.told()
    del broken["stats"]["regions"]
    with pytest.raises(ScheduleError, match=r"run\.json: not written by this version.*measured\.about\.stats\.regions"):
        About.found(broken, "run.json")


def test_an_engine_writes_what_the_page_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"stage": 3, "gradient_accumulation_steps": 2, "compile": {"enabled": False}}
    x, losses = torch.ones(2, 8), []
    with zw.initialize(model, optimizer, config=config) as engine:

        def loss_of(y: torch.Tensor, _: object = None) -> torch.Tensor:
            return y.square().mean()

        for _ in range(8):
            first = engine.train_step(x, loss_of)
            second = loss_of(engine(2 * x))
            engine.backward(second)
            engine.step()
            losses.append((first.item() + second.item()) / 2)
        engine.backward(loss_of(engine(9 * x)))
        engine.zero_grad()  # that window is given up
        with engine.profiling():
            for _ in range(2):
                engine.train_step(5 * x, loss_of)
        losses.append(sum(engine.train_step(x, loss_of).item() for _ in range(2)) / 2)
        stats = engine.stats
    shown = Courses.load(tmp_path / "rank0.json")
    told = shown.about
    assert told is not None and told.stats.regions == stats.regions == 3
    assert [number for number, _ in told.losses] == list(range(1, 10))
    # Neither what was given up nor what was tried out counts.
    assert [loss for _, loss in told.losses] == pytest.approx(losses)
    assert {number for number, _ in told.seconds} <= set(range(2, 10)) and len(told.seconds) > 5
    assert [slot.name for bucket in told.buckets for slot in bucket.slots][:2] == ["0.0.weight", "0.0.bias"]
    fastest, slowest = shown.others
    assert (fastest.name, slowest.name) == ("fastest", "slowest")
    assert fastest.seconds <= shown.courses[0].seconds <= slowest.seconds
    said = words(page(shown, "train.py", MADE))
    assert "All 3 regions run eagerly compile.enabled is false." in said
    assert "0.0.weight 8 × 8" in said
