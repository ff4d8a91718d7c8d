"""The documents are true: their snippets run, their links lead somewhere, and every config key is explained.

`make site` checks their links, and the anchors that these name, once more in the site.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run_code, zeroweave
from zeroweave.config import Config


def snippets(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def named(document: Path) -> str:
    return document.name


DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WITH_CODE = [document for document in DOCUMENTS if snippets(document, "python")]
TASKS = (
    *("README", "accumulation", "data", "ema", "evaluation", "experts", "gradients", "index", "large_models", "lora"),
    *("losses", "migrate", "nodes", "offload", "optimizers", "parameters", "precision", "ranks", "saving", "stages"),
    "training",
)
"""what is written for any number of ranks"""


def program(document: Path) -> str:
    """All of its snippets. Most run eagerly: what compiles is tested elsewhere and takes long."""
    code = "\n".join(snippets(document, "python"))
    if document.stem in ("README", "compile"):
        return code.replace('config={"stage": 3})', 'config={"stage": 3, "compile": {"lower": "aot_eager"}})')
    return f'import torch\n\ntorch.compiler.set_stance("force_eager")\n{code}'


@pytest.mark.parametrize("document", WITH_CODE, ids=named)
def test_python_snippets_run(document: Path, tmp_path: Path) -> None:
    ended, said = run_code(program(document), tmp_path, ROOT, ROOT / "examples")
    assert ended == 0, said


@pytest.mark.matrix
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.stem in TASKS], ids=named)
def test_python_snippets_run_on_two_ranks(document: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    paths = [str(ROOT), str(ROOT / "examples")]
    script.write_text(f"import os, sys\nsys.path[:0] = {paths}\nos.chdir({str(tmp_path)!r})\n{program(document)}")
    ended = zeroweave("run", "--nproc-per-node", 2, script)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


def test_every_config_key_is_explained_with_its_default() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| .*? \| (.*?) \|", (ROOT / "docs" / "config.md").read_text(), flags=re.MULTILINE
    )
    documented = dict(rows)
    defaults = flat(Config().model_dump())
    assert documented.keys() == defaults.keys()
    for key, default in defaults.items():
        shown = "none" if default is None else json.dumps(default).removesuffix(".0")
        assert documented[key].strip("`").startswith(shown), key


def test_the_toml_example_is_a_config(tmp_path: Path) -> None:
    (text,) = snippets(ROOT / "docs" / "config.md", "toml")
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert Config.load(path) == Config.load({"stage": 2, "gradient_clipping": 1.0, "precision": {"params": "bfloat16"}})


def flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested tables as dotted keys."""
    out: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
