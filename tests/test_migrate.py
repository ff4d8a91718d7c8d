"""The scripts of the pages about migrating: what each library trains, and what zeroweave trains of the same model."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT, run_code, zeroweave

SCRIPTS = ROOT / "examples" / "migrate"
NAMES = sorted(path.name.removesuffix("_before.py") for path in SCRIPTS.glob("*_before.py"))


def script(name: str, side: str) -> str:
    """Its text; nothing is compiled, which is tested elsewhere and takes long."""
    text = (SCRIPTS / f"{name}_{side}.py").read_text()
    if side == "before":
        return text
    if name == "deepspeed":
        return text.replace("config = {", 'config = {"compile": {"enabled": False},')
    return text.replace('{"stage": ', '{"compile": {"enabled": False}, "stage": ')


def losses(name: str, side: str, folder: Path) -> list[float]:
    folder.mkdir()
    ended, said = run_code(script(name, side), folder, ROOT)
    assert ended == 0, said
    return [float(each) for each in re.findall(r"loss'?:? '?([\d.e-]+)", said)]


def test_every_script_is_on_a_page_and_is_one_of_a_pair() -> None:
    assert NAMES == ["accelerate", "ddp", "deepspeed", "fsdp2", "lightning", "trainer", "trl"]
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for path in SCRIPTS.glob("*.py"):
        ast.parse(path.read_text())
        assert pages.count(f"(../examples/migrate/{path.name})") == 1
    assert len([*SCRIPTS.glob("*.py")]) == 2 * len(NAMES)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["accelerate", "lightning", "trainer", "trl"])
def test_a_library_and_zeroweave_have_the_same_losses(name: str, tmp_path: Path) -> None:
    module = {"trainer": "transformers"}.get(name, name)
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: make matrix installs it")
    before, now = (losses(name, side, tmp_path / side) for side in ("before", "after"))
    assert len(before) >= 8 and now == pytest.approx(before, rel=1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_torch_and_zeroweave_save_the_same_model(name: str, tmp_path: Path) -> None:
    saved = []
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        path = tmp_path / side / "script.py"
        path.write_text(f"import os\nos.chdir({str(path.parent)!r})\n{script(name, side)}")
        ended = zeroweave("run", "--nproc-per-node", 2, path)
        assert ended.returncode == 0, ended.stderr
        saved.append(torch.load(path.parent / "model.pt", weights_only=True))
    torch.testing.assert_close(*saved, rtol=1e-4, atol=1e-6)


def plain() -> list[float]:
    """The losses of the scripts about DeepSpeed, by PyTorch alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for index, batch in enumerate(torch.randn(8, 4, 16)):
        loss = model(batch).square().mean()
        (loss / 2).backward()
        if index % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_deepspeeds_config_trains_as_plain_pytorch_does(tmp_path: Path) -> None:
    assert losses("deepspeed", "after", tmp_path / "after") == pytest.approx(plain(), rel=1e-4)


@pytest.mark.matrix
def test_deepspeed_has_the_same_losses(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None or not torch.cuda.is_available():
        pytest.skip("deepspeed is not installed, or there is no GPU for it: its script is only parsed here")
    assert losses("deepspeed", "before", tmp_path / "before") == pytest.approx(plain(), rel=1e-3)
