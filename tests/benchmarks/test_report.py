"""Ratios and verdicts of a benchmark run, on records made by hand."""

from __future__ import annotations

from benchmarks import report
from benchmarks.lm import overrides
from benchmarks.worker import Record, Spec

SPEC = Spec("", "qwen3-8b", 4096, 1, steps=2, warm=1)


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
        peak_gib=peak,
        peak_reserved_gib=peak,
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
    found = report.verdicts(SPEC, rows)
    assert all(holds for holds, _ in found)
    assert sum("zeroweave-z3 against fsdp2-z3" in text for _, text in found) == 4


def test_verdicts_name_what_fails() -> None:
    mine = row("zeroweave-z2", [0.44] * 4, peak=10.6, first=10.1, loss=12.001)
    found = report.verdicts(SPEC, [mine, row("fsdp2-z2", [0.43] * 4)])
    assert [text for holds, text in found if not holds] == [
        "zeroweave-z2 against fsdp2-z2: median step 1.023 ×, at most 1.0",
        "zeroweave-z2 against fsdp2-z2: first step 2.020 ×, at most 2.0",
        "zeroweave-z2 against fsdp2-z2: peak memory 1.060 ×, at most 1.05",
        "zeroweave-z2 against fsdp2-z2: mean losses differ by 1.0e-03, three decimals allow 0.0005",
    ]


def test_a_slow_peer_does_not_count() -> None:
    found = report.verdicts(SPEC, [row("fsdp2-z3", [0.48] * 4)])
    assert [holds for holds, _ in found] == [False]


def test_the_table_has_a_cell_for_each_column() -> None:
    rows = [row("zeroweave-z3", [0.41] * 4), row("fsdp2-z3", [0.45] * 4)]
    assert all(len(line) == len(report.COLUMNS) for line in report.cells(rows))
    assert "| zeroweave-z3 |" in report.markdown(SPEC, rows)
    assert "0.911" in report.plain(rows)


def test_overrides_nest_and_keep_strings() -> None:
    assert overrides(["compile.prefetch=2", "transport.kind=process_group", "stage=3"]) == {
        "compile": {"prefetch": 2},
        "transport": {"kind": "process_group"},
        "stage": 3,
    }
