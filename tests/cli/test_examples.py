"""The examples for transformers, as a user runs them; the others have tests of their own."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest

from tests.support.commands import zeroweave

pytestmark = pytest.mark.matrix


def test_finetuning_a_transformers_model() -> None:
    arguments = ("--model", "qwen3", "--lower", "aot_eager", "--steps", 11)
    done = zeroweave("run", "--nproc-per-node", 2, "examples/hf_finetune.py", *arguments)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^step +(\d+)  loss ([\d.]+)  norm ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in told] == [0, 10]  # by one rank
    (first, last), norms = (float(loss) for _, loss, _ in told), [float(norm) for _, _, norm in told]
    assert first == pytest.approx(math.log(256), abs=0.3) and last < first - 0.5
    assert min(norms) > 0


def test_transformers_trainer_trains_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    last = []
    for more in (("--steps", 20), ("--steps", 40, "--resume")):
        arguments = ("--lower", "aot_eager", "--output-dir", tmp_path, *more)
        done = zeroweave("run", "--nproc-per-node", 2, "examples/hf_trainer.py", *arguments)
        assert done.returncode == 0, done.stderr
        told = [ast.literal_eval(line) for line in re.findall(r"^\{'loss'.*\}$", done.stdout, flags=re.MULTILINE)]
        assert len(told) == 2  # by one rank, and none of the first run's steps again
        last.append(float(told[-1]["loss"]))  # text in transformers 5
    assert last[1] < last[0] < math.log(256) - 0.5
    assert (tmp_path / "final" / "model.safetensors").exists()
