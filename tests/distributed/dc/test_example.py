"""examples/dc_zero2.py: the usage that DeepSpeed's documentation shows, in every stage."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from examples import dc_zero2
from tests.support.commands import ROOT
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave import dc

SETTINGS = [(1, False), (1, True), (2, False), (2, True), (3, False)]


def example(stage: int, partitioned: bool) -> None:
    """The example's own assertions hold; what it needs is there already."""
    try:
        dc_zero2.train(stage, partitioned)
    finally:
        dc.cleanup()


@daily(("stage", "partitioned"), SETTINGS[2:4], [*SETTINGS[:2], SETTINGS[4]])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_gradients_are_those_of_plain_data_parallelism(pools: Pools, world: int, stage: int, partitioned: bool) -> None:
    pools(world).run(example, stage, partitioned)


def torchrun(world: int, *options: object) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples" / "dc_zero2.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *map(str, options)], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("world", "stage", "partitioned"),
    [pytest.param(world, *setting, marks=pytest.mark.matrix) for world in (2, 3) for setting in SETTINGS],
)
def test_under_torchrun(world: int, stage: int, partitioned: bool) -> None:
    done = torchrun(world, "--stage", stage, *(["--partitioned"] if partitioned else []))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"stage {stage}, relative difference") == world
