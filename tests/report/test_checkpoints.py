"""`zeroweave ckpt inspect` on manifests of strangers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.small import manifest_of
from zeroweave.checkpoint.folder import Folder
from zeroweave.report.checkpoints import inspect


def test_sequences_that_a_terminal_obeys_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = Folder(tmp_path).begin("one")
    manifest = manifest_of(partial.path, "one", 1, seed=1)
    tensors = {f"\x1b]0;{name}\x07": entry for name, entry in manifest.tensors.items()}
    values = {"client": {"\x1b[2J": 1}}
    Folder(tmp_path).publish(partial, manifest.model_copy(update={"tensors": tensors, "values": values}))
    inspect(tmp_path)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert r"\x1b[2J" in shown and r"\x1b]0;shared\x07" in shown
