"""The config that a setting of zeroweave is built with."""

from __future__ import annotations

from benchmarks.peers.common import Options
from benchmarks.peers.zeroweave import configuration

BFLOAT16 = {"params": "bfloat16", "reduce": "bfloat16"}


def test_variants_win_over_the_command_line_and_are_merged_key_by_key() -> None:
    options = Options(
        zeroweave={"compile": {"prefetch": 2, "keep": "all"}},
        variants={"late": {"compile": {"prefetch": 0}}},
        gas=4,
    )
    assert configuration(3, ("graphs", "late"), options) == {
        "stage": 3,
        "gradient_accumulation_steps": 4,
        "precision": BFLOAT16,
        "compile": {
            "lower": "inductor",
            "memory_budget": "none",
            "prefetch": 0,
            "keep": "all",
            "cuda_graphs": True,
        },
    }


def test_nothing_is_compiled_if_nothing_is_lowered() -> None:
    assert configuration(2, (), Options(lower="none"))["compile"] == {
        "enabled": False,
        "memory_budget": "none",
        "cuda_graphs": False,
    }


def test_what_is_free_is_filled_by_a_variant() -> None:
    assert configuration(3, ("keeps",), Options())["compile"]["memory_budget"] == "auto"
