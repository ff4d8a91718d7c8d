"""Versions of transformers that its Trainer's bridge does not know are refused when it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ROOT, run_code


@pytest.mark.parametrize("version", ["4.56.2", "4.57.0", "6.0.0rc1", "6.1.0"])
def test_another_transformers_is_refused_with_what_to_install(version: str, tmp_path: Path) -> None:
    for name, has in (("transformers", version), ("accelerate", "1.15.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__version__ = {has!r}\n")
    ended, said = run_code("import zeroweave.integrations.hf", tmp_path, tmp_path, ROOT)
    assert ended != 0
    assert f"needs transformers 4.57.1 or newer, below 6, not {version}: pip install 'transformers>=4.57.1,<6'" in said
