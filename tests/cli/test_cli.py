"""The command line itself."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import zeroweave
from zeroweave import cli


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["run", "--help"], ["schedule", "--help"], ["doctor", "--help"]]
)
def test_every_command_explains_itself(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0 and "Usage" in result.output


@pytest.mark.parametrize("arguments", [["--stage", "4"], ["--ranks", "3"], ["--lower", "fast"], ["--steps", "0"]])
def test_wrong_values_are_refused_before_anything_starts(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith(f"zeroweave {zeroweave.__version__} (torch ")
