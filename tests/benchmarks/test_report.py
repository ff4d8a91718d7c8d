"""Ratios and verdicts of a benchmark run, on records made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import lm, report
from benchmarks.cases import CASES, Case
from benchmarks.lm import overrides
from benchmarks.worker import Record, Spec

SPEC = Spec("", "qwen3-8b", 4096, 1, steps=2, warm=1)
OTHER = replace(SPEC, seq=2048)
"""A workload of which no time is known."""


def record(impl: str, rank: int, step: float, peak: float = 10.0, first: float = 5.0, loss: float = 12.0) -> Record:
    return Record(
        impl=impl,
        rank=rank,
        world=4,
        device="NVIDIA H200",
        torch_version="2.11.0",
        setup_s=1.0,
        first_step_s=first,
        step_s=[step],
        host_s=0.1,
        peak_gib=peak + 1.0,
        steady_gib=peak,
        peak_reserved_gib=peak,
        reserved_gib=1.05 * peak,
        peak_setup_gib=peak,
        device_gib=peak,
        losses=[loss, loss],
        details={},
    )


def row(impl: str, steps: list[float], **more: float) -> report.Row:
    return report.row(SPEC, [record(impl, rank, step, **more) for rank, step in enumerate(steps)])


def test_a_row_is_that_of_the_slowest_rank() -> None:
    found = row("fsdp2-z3", [0.40, 0.45, 0.41, 0.42])
    assert found.step_s == 0.45
    assert found.tokens_s_gpu == 4096 / 0.45
    assert 440 < found.tflops_gpu < 450


def test_verdicts_compare_equal_stages() -> None:
    rows = [row("zeroweave-z3", [0.41] * 4), row("fsdp2-z3", [0.45] * 4), row("fsdp2-z2", [0.40] * 4)]
    found = report.verdicts(OTHER, rows)
    assert all(holds for holds, _ in found)
    assert sum("zeroweave-z3 against fsdp2-z3" in text for _, text in found) == 4
    assert sum("fsdp2-z3 / zeroweave-z3: median step 1.098" in text for _, text in found) == 1


def test_the_fastest_peer_that_was_run_counts_and_a_case_has_its_own_limits() -> None:
    rows = [row(name, [0.40] * 4) for name in ("zeroweave-graphs-z3", "zeroweave-z3")]
    rows += [row("fsdp2-z3", [0.60] * 4), row("fsdp2-ce-z3", [0.50] * 4, peak=9.9)]
    case = Case(speed={"zeroweave-graphs-z3": 1.3}, memory=1.0, host={"zeroweave-z3": 0.05})
    failed = [text for holds, text in report.verdicts(SPEC, rows, case) if not holds and "known" not in text]
    memory = [f"{label} 1.010 ×, at most 1.0" for label in ("steady memory", "memory of the GPU")]
    assert failed == [
        "fsdp2-ce-z3 / zeroweave-graphs-z3: median step 1.250, at least 1.3",
        *(f"zeroweave-graphs-z3 against fsdp2-ce-z3: {text}" for text in memory),
        "zeroweave-z3: host 0.1000 s of a step, at most 0.05",
        *(f"zeroweave-z3 against fsdp2-ce-z3: {text}" for text in memory),
    ]


def test_micro_steps_count_as_tokens() -> None:
    spec = replace(SPEC, gas=4)
    assert report.row(spec, [record("fsdp2-z3", 0, 0.5)]).tokens_s_gpu == 4 * 4096 / 0.5
    assert "4 micro-steps" in report.title(spec, [row("fsdp2-z3", [0.5])])


def test_verdicts_name_what_fails() -> None:
    mine = row("zeroweave-z2", [0.44] * 4, peak=10.6, first=10.1, loss=12.001)
    found = report.verdicts(OTHER, [mine, row("fsdp2-z2", [0.43] * 4)])
    assert [text for holds, text in found if not holds] == [
        "fsdp2-z2 / zeroweave-z2: median step 0.977, at least 1.0",
        "zeroweave-z2 against fsdp2-z2: first step 2.020 ×, at most 2.0",
        "zeroweave-z2 against fsdp2-z2: steady memory 1.060 ×, at most 1.05",
        "zeroweave-z2 against fsdp2-z2: memory of the GPU 1.060 ×, at most 1.05",
        "zeroweave-z2 against fsdp2-z2: mean losses differ by 1.0e-03, three decimals allow 0.0005",
    ]


def test_a_slow_peer_does_not_count() -> None:
    found = report.verdicts(SPEC, [row("fsdp2-ce-z3", [0.48] * 4), row("fsdp2-z3", [0.49] * 4)])
    assert found == [(False, "fsdp2-ce-z3, the fastest FSDP2 here, takes 1.129 of the known 0.425 s of fsdp2-ce-z3")]


def test_the_fastest_peer_is_compared_with_the_best_known_time_and_named() -> None:
    rows = [row("zeroweave-z3", [0.4] * 4), row("fsdp2-ce-z3", [0.48] * 4), row("fsdp2-ce-graphs-z3", [0.42] * 4)]
    best = "fsdp2-ce-graphs-z3, the fastest FSDP2 here, takes 0.988 of the known 0.425 s of fsdp2-ce-z3"
    assert report.verdicts(SPEC, rows)[0] == (True, best)
    line = "| qwen3-8b, 4,096 tokens, z3 | 0.4000 | 0.4200 `fsdp2-ce-graphs-z3` | 1.05 | 10.00 | 1.00 |"
    assert report.summary(SPEC, rows) == [line]
    column = report.COLUMNS.index("fastest peer")
    assert [cells[column] for cells in report.cells(rows)] == ["fsdp2-ce-graphs-z3", "–", "–"]


def test_a_graphed_peer_trains_as_the_eager_one() -> None:
    eager = row("fsdp2-ce-z3", [0.43] * 4)
    text = "fsdp2-ce-graphs-z3 against fsdp2-ce-z3: mean losses differ by {}, three decimals allow 0.0005"
    for loss, difference in ((12.0004, "4.0e-04"), (12.0006, "6.0e-04")):
        found = report.verdicts(SPEC, [row("fsdp2-ce-graphs-z3", [0.42] * 4, loss=loss), eager])
        assert found[1:] == [(loss < 12.0005, text.format(difference))]


def test_first_steps_are_not_compared_where_caches_were_kept() -> None:
    rows = [row("zeroweave-z3", [0.41] * 4, first=50.0), row("fsdp2-z3", [0.42] * 4)]
    cold, kept = (report.verdicts(SPEC, rows, Case(cached=cached)) for cached in (False, True))
    assert [text for _, text in cold if "first step" in text] == [
        "zeroweave-z3 against fsdp2-z3: first step 10.000 ×, at most 2.0"
    ]
    assert kept == [(holds, text) for holds, text in cold if "first step" not in text]


@pytest.mark.parametrize(
    ("world", "arguments", "impl", "best"),
    [
        (2, "--model qwen3-8b --seq 4096", "fsdp2-ce-z3", 0.4464),
        (2, "--model qwen3-8b --seq 4096", "fsdp2-ce-z2", 0.4281),
        (4, "--model qwen3-8b --seq 4096", "fsdp2-ce-z3", 0.425),
        (4, "--model qwen3-8b --seq 4096", "fsdp2-ce-z2", 0.4068),
        (4, "--model qwen3-8b --seq 1024", "fsdp2-ce-z3", 0.2537),
        (2, "--model qwen3-8b --seq 1024", "fsdp2-ce-z3", 0.233),
        (2, "--model qwen3-8b --seq 1024", "fsdp2-ce-z2", 0.192),
        (2, "--model llama-1b --seq 2048 --micro-batch 2", "fsdp2-ce-z3", 0.0852),
        (2, "--model llama-1b --seq 512", "fsdp2-ce-z2", 0.078),
    ],
)
def test_a_slow_peer_does_not_count_where_its_best_time_is_known(
    world: int, arguments: str, impl: str, best: float
) -> None:
    a = lm.parser().parse_args(arguments.split())
    spec = Spec(impl, a.model, a.seq, a.micro_batch, steps=2, warm=1)

    def verdicts(seconds: float, spec: Spec = spec, **more: Any) -> list[tuple[bool, str]]:
        records = [replace(record(impl, rank, seconds), **more) for rank in range(world)]
        return report.verdicts(spec, [report.row(spec, records)])

    text = f"{impl}, the fastest FSDP2 here, takes {{}} of the known {best} s of {impl}"
    assert verdicts(1.04 * best) == [(True, text.format("1.040"))]
    assert verdicts(1.06 * best) == [(False, text.format("1.060"))]
    assert verdicts(9.0, device="NVIDIA H100 80GB HBM3") == []
    changes: list[dict[str, Any]] = [{"hf": "causal"}, {"gas": 2}, {"lora": 8}, {"seq": a.seq + 1}, {"micro_batch": 3}]
    for change in (*changes, {"model": "small"}, {"group_size": 2}):
        assert verdicts(9.0, replace(spec, **change)) == [], change
    three = [record(impl, rank, 9.0) for rank in range(3)]
    assert report.verdicts(spec, [report.row(spec, three)]) == []


def test_cases_of_our_own_models_know_their_peer() -> None:
    for name, case in CASES.items():
        a = lm.parser().parse_args(case.arguments.split())
        known = report.KNOWN_FSDP2.get((a.model, a.seq, a.micro_batch, 2, "NVIDIA H200"), {})
        assert a.hf or {best for best, _ in known.values()} & set(a.impl.split(",")), name


def test_the_table_has_a_cell_for_each_column() -> None:
    rows = [row("zeroweave-z3", [0.41] * 4), row("fsdp2-z3", [0.45] * 4)]
    assert all(len(line) == len(report.COLUMNS) for line in report.cells(rows))
    assert "| zeroweave-z3 |" in report.markdown(SPEC, rows)
    assert "1.098" in report.plain(rows)
    noted = report.row(SPEC, [replace(record("fsdp2-ce-z3", 0, 0.4), note="plain")])
    assert "* fsdp2-ce-z3: plain\n" in report.markdown(SPEC, [noted])


def test_what_was_no_graph_is_told() -> None:
    details = {"graphed_calls": 20, "ungraphed_calls": {"a new shape": 2}}
    found = report.row(SPEC, [replace(record("zeroweave-graphs-z3", 0, 0.4), details=details)])
    peer = report.row(SPEC, [replace(record("fsdp2-graphs-z3", 0, 0.4), details={"graphed_steps": 9})])
    assert report.notes([found, peer, row("zeroweave-z3", [0.4])]) == [
        "zeroweave-graphs-z3: 20 calls were launched as graphs; 2 were not: a new shape",
        "fsdp2-graphs-z3: 9 steps were launched as one graph each",
    ]
    assert "graphs 20" in report.line(found) and "graphs 9" in report.line(peer)


def test_a_step_moves_what_its_schedule_says() -> None:
    details = {"scheduled": {"all_gather": 3 << 30}, "traffic": {"all_gather": {"payload": 3 << 30}}}
    found = report.row(SPEC, [replace(record("zeroweave-z3", 0, 0.4), details=details)])
    text = "zeroweave-z3: all_gather of 3.00 GiB in the last step, 3.00 by its schedule"
    assert report.verdicts(SPEC, [found]) == [(True, text)]
    less = report.row(SPEC, [replace(record("zeroweave-z3", 0, 0.4), details={**details, "traffic": {}})])
    assert report.verdicts(SPEC, [less]) == [(False, text.replace("of 3.00", "of 0.00"))]
    assert report.verdicts(SPEC, [row("zeroweave-z3", [0.4])]) == []


def test_a_case_may_compare_two_settings() -> None:
    rows = [row("zeroweave-kept-z3", [0.4]), row("zeroweave-z3", [0.38])]
    case = Case(no_slower={"zeroweave-kept-z3": "zeroweave-z3"})
    assert report.verdicts(SPEC, rows, case) == [
        (False, "zeroweave-z3 / zeroweave-kept-z3: median step 0.950, at least 1.0")
    ]
    assert report.verdicts(SPEC, rows[:1], case) == []


def test_overrides_nest_and_keep_strings() -> None:
    assert overrides(["compile.prefetch=2", "transport.kind=process_group", "stage=3"]) == {
        "compile": {"prefetch": 2},
        "transport": {"kind": "process_group"},
        "stage": 3,
    }


def test_overrides_are_json_or_python() -> None:
    values = "a=true", "b=None", "c=null", 'd={"e": false}', "f=('x',)", "g=1e-3", "h=auto"
    found = overrides(values)
    rest = {"d": {"e": False}, "f": ("x",), "g": 1e-3, "h": "auto"}
    assert found == {"a": True, "b": None, "c": None} | rest
