"""The command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import zeroweave
from zeroweave import cli


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["run", "--help"], ["schedule", "--help"], ["doctor", "--help"]]
)
def test_every_command_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0 and "Usage" in result.output


def commands(of: Any, *before: str) -> Iterator[list[str]]:
    """All commands with those they are under."""
    for name, command in getattr(of, "commands", {}).items():
        yield [*before, name]
        yield from commands(command, *before, name)


@pytest.mark.parametrize("arguments", [[], *commands(typer.main.get_command(cli.app))], ids=" ".join)
def test_help_fits_a_terminal_of_80_columns(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*arguments, "--help"], terminal_width=80, env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert result.exit_code == 0 and max(map(len, lines)) <= 80
    for line in lines[lines.index("Options:") :]:
        assert not line.endswith("..."), f"{line!r} is cut off: its command needs a short_help"
        assert " range>" not in line and "<path>" not in line, f"{line!r} tells a type in Python's words"


@pytest.mark.parametrize("arguments", [["--stage", "4"], ["--ranks", "3"], ["--lower", "fast"], ["--steps", "0"]])
def test_wrong_values_are_refused_before_anything_starts(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith(f"zeroweave {zeroweave.__version__} (torch ")
