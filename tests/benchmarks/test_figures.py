"""What benchmarks make of figures made by hand, the models that they train, and the rows of tables.sh."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import compile_cost, host, lm, offload, plan
from benchmarks.cases import CASES
from benchmarks.compact import COMPACT, FULL, Run, table
from benchmarks.gathers import HEAD, SIZES, Cost, least, lines
from benchmarks.models import SHAPES, Decoder, batches, build, parameter_count, step_flops
from benchmarks.saving import Figures, Found

CPU = torch.device("cpu")
MIB = 1 << 20


def test_the_slowest_rank_counts_and_the_last_line_is_the_measure() -> None:
    ours = host.worst([host.Record(10.0, 40.0, 12.0, 80.0), host.Record(20.0, 30.0, 24.0, 60.0)])
    assert ours == host.Record(20.0, 40.0, 24.0, 80.0)
    lines = host.table([("zeroweave", ours), ("older", host.Record(40.0, 80.0, 50.0, 90.0))]).splitlines()
    assert lines[2:] == [
        "| zeroweave | 20.0 | 40.0 | 0.500 | 24.0 | 80.0 |",
        "| older | 40.0 | 80.0 | 1.000 | 50.0 | 90.0 |",
    ]


def test_saving_leaves_the_first_round_out_and_the_limits_are_ratios() -> None:
    found = Found("CPU", 2**30, [9.0, 1.0], [9.0, 1.25], [9.0, 0.125], [[1.0], [0.5, 1.5]], [[9.0], [1.0, 1.08]])
    figures = Figures.of(found)
    assert figures == Figures(1.0, 1.25, 0.125, 1.0, 1.04, (9.0, 1.04)) and figures.held
    assert "| `save` | 1.250 | 0.80 | 0.80 of save_file's speed |" in figures.table(1.0)
    assert not Figures(1.0, 1.25, 0.126, 1.0, 1.04, ()).held
    assert not Figures(1.0, 1.7, 0.1, 1.0, 1.04, ()).held
    assert not Figures(1.0, 1.25, 0.1, 1.0, 1.06, ()).held


def setting(name: str, peak: int, device: int, **more: float) -> dict[str, float | str]:
    state = {"masters": 400, "moments": 800, "host_masters": 0, "host_moments": 0, "loss": 1.0, "budget": 0}
    return {"name": name, "peak": peak, "device": device, **state, **more}


def test_what_must_hold_of_offload() -> None:
    good = [setting("none", 5000, 1200), setting("all", 4000, 200), setting("adaptive", 4500, 700, budget=4500)]
    good.append(setting("all + params", 3900, 0))
    assert offload.problems(good) == []
    assert offload.budget(*good[:2]) == 4500
    for index, worse, message in (
        (1, {"peak": 4300}, "all: the peak falls by less than 0.9 × moments"),
        (3, {"peak": 4000}, "all + params: the peak falls by less than 0.9 × masters and moments"),
        (2, {"peak": 4501}, "above the budget"),
        (2, {"device": 1200}, "not between"),
        (2, {"loss": 1.1}, "losses differ"),
    ):
        rows = [{**each, **(worse if i == index else {})} for i, each in enumerate(good)]
        (found,) = offload.problems(rows)
        assert message in found


PLANNED = plan.Row("tiny:16:1", 3, peak=10.0, planned_peak=10.9, step=1.0, by_sheet=0.5, calibrated=0.86, wrong=())


def test_what_must_hold_of_plans() -> None:
    assert plan.problems([PLANNED]) == []
    assert "| 10.00 | 10.90 | 1.090 | 1.0000 | 0.5000 | 0.500 | 0.8600 | 0.860 |" in plan.table([PLANNED])
    for worse, message in (
        ({"planned_peak": 11.1}, "the peak is 1.110"),
        ({"planned_peak": 8.9}, "the peak is 0.890"),
        ({"calibrated": 1.16}, "the time is 1.160"),
        ({"calibrated": 0.84}, "the time is 0.840"),
        ({"wrong": ("masters",)}, "other bytes of masters"),
    ):
        (found,) = plan.problems([replace(PLANNED, **worse)])
        assert message in found
    on_cpu = replace(PLANNED, peak=0.0, calibrated=0.1)
    assert plan.problems([on_cpu]) == [] and "– | – | –" in plan.table([on_cpu])


@pytest.mark.parametrize(
    ("asked", "told"),
    [("--case tiny:16", "MODEL:SEQ"), ("--case huge:1:1", "the models are"), ("--steps 2 --warm 2", "--warm")],
)
def test_plans_that_cannot_be_measured_are_refused(asked: str, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        plan.main(asked.split())


def costs(*totals: float) -> list[Cost]:
    return [Cost(size, total, 3 * total / 4, total / 4) for size, total in zip(SIZES, totals, strict=False)]


@pytest.mark.parametrize(
    ("kernel", "copies", "size"),
    [
        ((1, 2, 3, 4, 5), (9, 9, 2, 3, 4), 16 * MIB),
        ((1, 2, 3, 4, 5), (0, 0, 0, 0, 0), MIB),
        ((1, 2, 3, 4, 5), (0, 9, 0, 0, 0), 16 * MIB),
        ((1, 2, 3, 4, 5), (0, 0, 0, 0, 5), None),
        ((1, 2), (2, 1), 4 * MIB),
    ],
)
def test_the_size_from_which_on_copy_engines_cost_less(
    kernel: Sequence[float], copies: Sequence[float], size: int | None
) -> None:
    assert least(costs(*kernel), costs(*copies)) == size


def test_each_size_is_a_row_below_the_result() -> None:
    kernel = [Cost(size * MIB, alone=1e-3, beside=8e-3, lost=2e-3) for size in (1, 4)]
    copies = [Cost(size * MIB, alone=4e-3, beside=3e-3, lost=5e-3) for size in (1, 4)]
    told, empty, head, rule, *rows = lines(kernel, copies)
    assert (told, empty) == ("by copy engine from 1 MiB on", "")
    assert head.count("|") == rule.count("|") == len(HEAD) + 1
    assert rows == [f"| {size} | 1.000 | 8.000 | 2.000 | 4.000 | 3.000 | 5.000 |" for size in (1, 4)]


def test_a_table_has_a_row_for_each_stretch() -> None:
    runs = {kind: [Run([2.0, 1.0, 1.0, 0.5], 12.0), Run([4.0, 1.0, 1.0, 0.5], 12.0)] for kind in (FULL, COMPACT)}
    lines = list(table(runs, 2))
    assert lines[2] == "| 1–2 | 2.0000 | 2.0000 | +0.0000, +0.0000 | 1.0000 |"
    assert lines[3].startswith("| 3–4 | 0.7500 |")


PHASES = {"dynamo": 1.0, "lower": 8.0}
COLD = compile_cost.Record(0, 10.0, 9.0, 0.1, 4, 0, 4, PHASES)
WARM = replace(COLD, first_step=2.0, found=4, compiled=0)


def results(**many: float) -> list[tuple[compile_cost.Spec, list[compile_cost.Record]]]:
    """Of 2 and 4 blocks, alone and on two ranks; `many` replaces what was found with 4 blocks."""
    most = replace(COLD, **many)
    return [
        (compile_cost.Spec("zeroweave", 2, 1, "a"), [COLD]),
        (compile_cost.Spec("zeroweave", 4, 1, "b"), [most]),
        (compile_cost.Spec("zeroweave", 4, 1, "b", warm=True), [WARM]),
        (compile_cost.Spec("whole", 4, 1, "c"), [replace(COLD, lowered=2, compiled=2, phases={})]),
        (
            compile_cost.Spec("zeroweave", 2, 2, "d"),
            [replace(COLD, found=1, compiled=3), replace(COLD, rank=1, found=3, compiled=1)],
        ),
        (compile_cost.Spec("zeroweave", 2, 2, "d", warm=True), [WARM, replace(WARM, rank=1)]),
    ]


def failing(found: list[tuple[compile_cost.Spec, list[compile_cost.Record]]]) -> list[int]:
    return [index for index, (holds, _) in enumerate(compile_cost.verdicts(found)) if not holds]


def test_verdicts_name_what_fails() -> None:
    assert failing(results()) == []
    assert failing(results(compiled=5)) == [0]
    assert failing(results(first_step=13.1)) == [1]
    alone = results()
    alone[4] = (alone[4][0], [COLD, COLD])
    assert failing(alone) == [2]
    alone = results()
    alone[2] = (alone[2][0], [replace(WARM, compiled=1)])
    assert failing(alone) == [3]
    assert "first step at 4 blocks 1.000 × that at 2" in compile_cost.verdicts(results())[1][1]


def test_every_rank_has_a_line_with_all_phases() -> None:
    lines = compile_cost.table(results()).splitlines()
    assert len(lines) == 2 + 8 and len({line.count("|") for line in lines}) == 1
    assert lines[0].endswith("| dynamo s | lower s |") and "torch.compile(model)" in lines[5]


SCRIPT = Path(lm.__file__).with_name("tables.sh").read_text()
ROWS = re.findall(r"^    row (\S+) (\S+) (z\d) (.+)$", SCRIPT, re.MULTILINE)


def test_rows_of_tables_sh_are_known_comparisons() -> None:
    assert len(ROWS) > 9
    for name, case, stage, arms in ROWS:
        asked = lm.parser().parse_args(CASES[case].arguments.split())
        known = {each for (each,) in lm.implementations(asked.impl, ce_rs=False, variants={})}
        names = {f"{'fsdp2-ce-graphs' if arm == 'peer' else arm}-{stage}" for arm in arms.split()}
        unlike = {each.replace("-fours", "") for each in names} - known  # any row may have four blocks in a bucket
        assert not unlike, (name, unlike)


def test_the_header_of_tables_sh_names_every_row() -> None:
    header = re.sub(r"\n# *", " ", SCRIPT.split("\nset -uo")[0])
    for name, *_ in ROWS:
        assert re.search(rf"[ ,]{re.escape(name)}[ ,;]", header), name


def test_the_large_one_has_its_published_size() -> None:
    assert parameter_count(SHAPES["qwen3-8b"]) == 8_190_735_360
    assert 1.9e14 < step_flops(SHAPES["qwen3-8b"], 4096, 4096) < 2.1e14


def test_bfloat16_and_fp32_models_start_equal() -> None:
    low, high = (
        dict(build(SHAPES["tiny"], CPU, dtype).named_parameters()) for dtype in (torch.bfloat16, torch.float32)
    )
    assert all(torch.equal(low[name].float(), value) for name, value in high.items())
    assert not torch.equal(high["layers.0.gate.weight"], high["layers.0.up.weight"])


def test_the_first_loss_is_that_of_guessing() -> None:
    shape = SHAPES["tiny"]
    model: Decoder = build(shape, CPU, torch.float32)
    tokens = next(batches(shape, 2, 64, rank=0, device=CPU))
    assert abs(model(tokens, tokens).item() - math.log(512)) < 0.2


def test_ranks_read_different_data_and_runs_the_same() -> None:
    first, second, again = (next(batches(SHAPES["tiny"], 1, 32, rank, CPU)) for rank in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)
