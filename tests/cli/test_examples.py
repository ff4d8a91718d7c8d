"""The example for transformers, as a user runs it; the others have tests of their own."""

from __future__ import annotations

import math
import re

import pytest

from tests.support.commands import zeroweave


@pytest.mark.matrix
def test_finetuning_a_transformers_model() -> None:
    arguments = ("--model", "qwen3", "--lower", "aot_eager", "--steps", 11)
    done = zeroweave("run", "--nproc-per-node", 2, "examples/hf_finetune.py", *arguments)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^step +(\d+)  loss ([\d.]+)  norm ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in told] == [0, 10]  # by one rank
    (first, last), norms = (float(loss) for _, loss, _ in told), [float(norm) for _, _, norm in told]
    assert first == pytest.approx(math.log(256), abs=0.3) and last < first - 0.5
    assert min(norms) > 0
