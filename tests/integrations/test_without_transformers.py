"""Where transformers is not installed: what needs it says what to install, and the extra knows which releases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import zeroweave as zw
from zeroweave.plan.model import source_of

INSTALL = r"pip install 'zeroweave\[examples\]'"


def test_what_needs_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(zw.UnsupportedError, match=rf"load_pretrained\(\) needs transformers: {INSTALL}"):
        zw.load_pretrained(tmp_path)
    with pytest.raises(zw.EngineError, match=f"a config of transformers, which is not installed: {INSTALL}"):
        source_of(str(tmp_path), 1, 8)
