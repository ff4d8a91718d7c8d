"""docs/architecture.md: its picture is what the linter enforces, and every name in it stands where it says."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zeroweave"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", TEXT)))


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first, as the import-linter has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["id"] == "floors")
    rooms = [[room for room in layer.split(" : ") if not room.startswith("(")] for layer in layers]
    return [floor for floor in rooms if floor]


def defined(tree: ast.AST) -> dict[str, ast.AST]:
    """What a module or a class defines, by name."""
    names: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_picture_is_what_the_linter_enforces() -> None:
    """What a room is for is said in the document's words; which rooms there are, and on which floor, is not."""
    (picture,) = re.findall(r"```\n(│.*?)\n```", TEXT, flags=re.DOTALL)
    drawn = [re.findall(r"^│ (\w+) +\S", floor, flags=re.MULTILINE) for floor in picture.split("\n├")]
    assert drawn == floors()


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_is_named_is_there(file: str, name: str) -> None:
    path = ROOT / file if file.startswith("tests/") else PACKAGE / file
    place: ast.AST = ast.parse(path.read_text())
    for part in filter(None, name.split(".")):
        assert part in defined(place), f"{file} has no {name}"
        place = defined(place)[part]


def test_folders_that_are_named_exist() -> None:
    folders = re.findall(r"`([\w/]+/)`", TEXT)
    assert folders and [each for each in folders if not ((ROOT / each).is_dir() or (PACKAGE / each).is_dir())] == []
