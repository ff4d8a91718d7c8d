"""Every kernel becomes code for NVIDIA's GPUs, which takes none of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_kernels_become_code() -> None:
    command = [sys.executable, "-m", "tests.triton_kernels.compiling"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, made in json.loads(done.stdout).items():
        assert made["bytes"] > 1000, case
        assert made["fused"] == 0, f"{case}: a product that is not rounded would differ between kernels"
        assert any(".v4." in each for each in made["accesses"]), f"{case}: less than 128 bits at a time"
