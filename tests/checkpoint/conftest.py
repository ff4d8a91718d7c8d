"""What several tests of checkpoints begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.small import write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with one checkpoint, of seed 1."""
    write(tmp_path / "runs", "one", 1, seed=1)
    return tmp_path / "runs"
