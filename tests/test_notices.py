"""Warnings come from rank 0 and name the line of the user's program, however deep in the package they arise."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import zeroweave as zw
from zeroweave.notices import warn, working

PACKAGE = Path(zw.__file__).parent


def told(run: Callable[[], Any]) -> list[tuple[str, int, str]]:
    """What `run` warns of: file, line and text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [(each.filename, each.lineno, str(each.message)) for each in caught]


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def test_a_config_is_warned_of_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []

    def read() -> None:
        lines.append(here() + 1)
        zw.Config.from_deepspeed({"zero_optimization": {"stage": 3}, "gradient_clipping": 0, "steps_per_print": 1})

    ((file, line, text),) = told(read)
    assert (file, line) == (__file__, lines[0]) and "steps_per_print" in text
    monkeypatch.setenv("RANK", "1")
    assert told(read) == []
    monkeypatch.setenv("RANK", "0")
    assert len(told(read)) == 1


def test_a_rank_that_is_known_counts_more_than_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert told(lambda: warn("text", 1)) == []
    assert len(told(lambda: warn("text", 0))) == 1


def engine(**settings: Any) -> zw.Engine:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    settings = {"compile": {"enabled": False}, **settings}
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), settings)


def test_a_loss_that_is_not_scaled_is_warned_of_at_its_backward() -> None:
    with engine(gradient_accumulation_steps=2) as trained:
        loss = trained(torch.ones(2, 4)).sum()
        lines = []

        def backward() -> None:
            lines.append(here() + 1)
            loss.backward()

        ((file, line, text),) = told(backward)
        assert (file, line) == (__file__, lines[0]) and "loss.backward()" in text
        trained.zero_grad()


class Unsupported(nn.Linear):
    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_region_that_runs_eagerly_is_warned_of_at_the_call_of_the_engine() -> None:
    model = nn.Sequential(*(nn.Sequential(Unsupported(4, 4)) for _ in range(2)))
    with zw.initialize(model, config={"compile": {"lower": "aot_eager"}}) as made:
        lines = []

        def call() -> None:
            lines.append(here() + 1)
            made(torch.ones(2, 4))

        ours = [each for each in told(call) if "trains eagerly" in each[2]]
        assert [each[:2] for each in ours] == [(__file__, lines[0])]


def test_a_thread_without_a_line_of_the_user_warns_where_the_main_thread_is() -> None:
    def run() -> None:
        thread = threading.Thread(target=warn, args=("text",))
        thread.start()
        thread.join()

    ((file, _, _),) = told(run)
    assert not Path(file).is_relative_to(PACKAGE)


def test_one_line_is_told_once_by_default() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("text")
    assert len(caught) == 1


def test_nothing_in_the_package_counts_frames() -> None:
    asking = [path.name for path in PACKAGE.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert asking == ["notices.py"]


def test_what_a_command_is_at_is_a_line_each_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with working() as tell:
        tell("reading a file")
        tell("counting [its] lines")
    assert capsys.readouterr() == ("", "zeroweave: reading a file\nzeroweave: counting [its] lines\n")


def test_what_a_command_is_at_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        "zeroweave.notices.on_stderr", lambda: Console(file=shown, force_terminal=True, width=60, legacy_windows=False)
    )
    with working() as tell:
        tell("reading [a] file")
        time.sleep(0.3)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "zeroweave: reading [a] file" in text and shown.getvalue().endswith("\x1b[2K")
