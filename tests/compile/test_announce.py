"""Lines on the terminal while the first step compiles, and silence everywhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zeroweave.compile.progress import Announcer, pattern

SCRIPT = """
import warnings; warnings.simplefilter("ignore")
import torch
from torch import nn
import zeroweave as zw

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.outer = nn.Linear(width, 4)
    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))

model = nn.ModuleDict({"layers": nn.Sequential(Block(8), Block(8)), "head": nn.Sequential(Block(3), Block(3))})
model.forward = lambda x: model["head"](model["layers"](x))
engine = zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"compile": {"lower": "aot_eager"}})
for size in (2, 2, 5):
    engine.backward(engine(torch.ones(size, 4)).sum())
    engine.step()
    print("step", flush=True)
assert engine.stats.graphs > 2, engine.stats
engine.destroy()
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


def said(tmp_path: Path, terminal: bool = True, **environment: str) -> str:
    """What the script writes to stderr, a terminal or a pipe; where it writes a line anew, its last state."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": os.getcwd(), **environment}
    env = {name: value for name, value in env.items() if value or name not in environment}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    read = bytearray()
    try:
        while chunk := os.read(ours, 4096):
            read += chunk
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(ours)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and output.count(b"step") == 3, read.decode()
    return read.decode()


@pytest.mark.matrix
def test_each_group_of_regions_has_a_line_in_the_first_step(tmp_path: Path) -> None:
    text = said(tmp_path)
    lines = ESCAPES.sub("\n", text).splitlines()
    states = [line.strip() for line in lines if line.strip()]
    ended = dict.fromkeys(re.sub(r", \d+ s$", "", line) for line in states)
    assert [line.removeprefix("zeroweave: compiling ") for line in ended] == [
        "layers.* (1 of 2)",
        "layers.1 once more, for other inputs",  # the gradient of its input is asked for
        "head.* (2 of 2)",
        "the backward of head.0",
        "the backward of layers.1",
        "the backward of layers.0",
    ], text
    assert all(re.search(r", \d+ s$", line) for line in states)
    assert "\x1b[?25l" not in text, "the cursor is left alone"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("terminal", "environment"),
    [(False, {}), (True, {"ZEROWEAVE_QUIET": "1"})],
)
def test_silence(tmp_path: Path, terminal: bool, environment: dict[str, str]) -> None:
    assert "compiling" not in said(tmp_path, terminal, **environment)


class Terminal:
    def isatty(self) -> bool:
        return True


def test_a_reader_is_rank_0s_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROWEAVE_QUIET", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert [Announcer.on_terminal(rank, lambda: True).speaks for rank in (0, 1)] == [True, False]
    monkeypatch.setenv("ZEROWEAVE_QUIET", "1")
    assert not Announcer.on_terminal(0, lambda: True).speaks
    monkeypatch.delenv("ZEROWEAVE_QUIET")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not Announcer.on_terminal(0, lambda: True).speaks


@pytest.mark.parametrize(
    ("names", "one"),
    [
        ([""], "the model"),
        (["head"], "head"),
        (["model.layers.0", "model.layers.1"], "model.layers.*"),
        (["encoder.0.mlp", "decoder.1.mlp"], "*.*.mlp"),
        (["tail", "layers.0", "layers.1"], "tail and 2 more"),
    ],
)
def test_regions_with_one_code_have_one_name(names: list[str], one: str) -> None:
    assert pattern(names) == one
