"""Every private name of PyTorch that `zeroweave/_torch/` uses exists, and no other module uses any.

The tests read the source, so that a name is tested from the moment it is written. What cannot be seen from the
names alone stands in the files beside this one.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zeroweave._torch as private
from tests.support.marks import slow

PRIVATE = Path(private.__file__).parent
PACKAGE = PRIVATE.parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if PRIVATE not in path.parents)

pytestmark = pytest.mark.oldest


def torch_names(path: Path) -> Iterator[str]:
    """Dotted names under `torch` that a file imports or reads, such as "torch._dynamo.exc.Unsupported".

    Names read through an import are resolved: after `from torch._inductor.virtualized import V`,
    `V.set_fake_mode` is "torch._inductor.virtualized.V.set_fake_mode". An import inside a top-level function
    or class counts there only.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_all: dict[str, str] = {}
    for statement in tree.body:
        for_all.update(imports_of(statement) if isinstance(statement, ast.Import | ast.ImportFrom) else {})
    for statement in tree.body:
        known = {**for_all, **imports_of(statement)}
        yield from imports_of(statement).values()
        for node in ast.walk(statement):
            chain: list[str] = []
            while isinstance(node, ast.Attribute):
                chain.insert(0, node.attr)
                node = node.value
            if chain and isinstance(node, ast.Name) and node.id in known:
                yield ".".join([known[node.id], *chain])


def imports_of(statement: ast.stmt) -> dict[str, str]:
    """The names under `torch` that the imports inside a statement bind, each with its dotted name."""
    bound: dict[str, str] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: target for name, target in bound.items() if target.split(".")[0] == "torch"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def resolve(name: str) -> object:
    """The object of a dotted name; ImportError or AttributeError where there is none."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:index]))
    return value


CUDA_ONLY = ("torch._C._cuda_clearCublasWorkspaces",)
NAMES = sorted({name for path in PRIVATE.glob("*.py") for name in torch_names(path) if is_private(name)})


@slow("torch._inductor.compile_fx._recursive_joint_graph_passes")
@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    if name in CUDA_ONLY and not torch.backends.cuda.is_built():
        pytest.skip("a build without CUDA")
    resolve(name)


def test_a_name_that_is_gone_is_noticed() -> None:
    for name in ("torch._no_such_module", "torch._dynamo.exc.NoSuchError", "torch.Tensor._no_such_attribute"):
        with pytest.raises((ImportError, AttributeError)):
            resolve(name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_names_are_used_in_one_place_only(path: Path) -> None:
    assert [name for name in torch_names(path) if is_private(name)] == []


@pytest.mark.parametrize("path", sorted(PRIVATE.glob("*.py")), ids=lambda path: path.name)
def test_every_function_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if not ast.get_docstring(node)] == []
