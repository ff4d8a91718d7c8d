"""The package where nothing of the checkout can be found but what is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

pytestmark = pytest.mark.matrix


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package's files alone, as a wheel holds them."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "zeroweave", site / "zeroweave", ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_the_demo_runs_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import zeroweave.cli; print(zeroweave.__file__, flush=True); zeroweave.cli.app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--eager", "--ranks", "1", "--steps", "12", "--stage", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(str(installed))
    figures = json.loads(last)
    assert (figures["ranks"], figures["steps"]) == (1, 12)
