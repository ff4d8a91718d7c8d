"""Who writes an attribute: the object that owns it, and nobody else.

    python tools/wiring.py zeroweave/runtime zeroweave/comm ...

Lists each place in these files and folders where an attribute of an object other than `self` or `cls` is assigned,
deleted, set with `setattr` or put into its `__dict__`, and ends with status 1 where there is one. Meant are the
attributes that a class of the package owns: it assigns them on `self`, or declares them in its body. Those of other
people's objects (`sys.argv`, a tensor's `grad`) are not. An attribute whose name is computed may be any. An object that
the same function has made does not count as another one. What `vars(other).update(values)` puts somewhere is not seen:
the package does so with objects of other people only, such as users' tensors and modules.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_OWN = ("self", "cls")
_TENSORS = {"data", "grad", "requires_grad"}
"""What tensors let everybody write, whatever a class of the package calls so."""
_ANY = "?"
"""The name of an attribute that is computed."""


class Package:
    """The classes of a package, by name, and the attributes that they own."""

    def __init__(self, root: Path) -> None:
        self.classes: set[str] = set()
        self.attributes: set[str] = set()
        for file in _files([root]):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    self.classes.add(node.name)
                    self.attributes.update(_declared(node))
                elif (write := _written(node)) is not None and _is_named(write[0], _OWN):
                    self.attributes.add(write[1])
        self.attributes -= _TENSORS

    def breaches(self, places: Iterable[Path]) -> Iterator[str]:
        """Each write from outside in these files and folders, as "file:line: object.attribute"."""
        for file in _files(places):
            tree = ast.parse(file.read_text())
            for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))):
                own = {*_OWN, *self._made(scope)}
                for node in _inside(scope):
                    write = _written(node)
                    if write is not None and write[1] in (*self.attributes, _ANY) and not _is_named(write[0], own):
                        yield f"{file}:{node.lineno}: {ast.unparse(write[0])}.{write[1]}"

    def _made(self, scope: ast.AST) -> set[str]:
        """The local names that are bound to new objects of the package's classes only."""
        nodes = list(_inside(scope))
        new = {
            id(target)
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign) and self._makes(node.value)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        bound = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        return {name.id for name in bound} - {name.id for name in bound if id(name) not in new}

    def _makes(self, value: ast.expr | None) -> bool:
        """Is it a call of a class, or of something that makes an object of the class that it is given?"""
        if not isinstance(value, ast.Call):
            return False
        return any(_is_named(each, {*self.classes, "cls"}) for each in (value.func, *value.args[:1]))


def _files(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _written(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The object and the attribute that a node writes, if it writes one."""
    match node:
        case ast.Attribute(value, name, ast.Store() | ast.Del()):
            return value, name
        case ast.Call(ast.Name("setattr" | "delattr"), [value, name, *_]):
            return value, _literal(name)
        case ast.Call(ast.Attribute(_, "__setattr__" | "__delattr__"), [value, name, *_]):
            return value, _literal(name)
        case ast.Subscript(ast.Attribute(value, "__dict__"), name, ast.Store() | ast.Del()):
            return value, _literal(name)
        case ast.Subscript(ast.Call(ast.Name("vars"), [value]), name, ast.Store() | ast.Del()):
            return value, _literal(name)
    return None


def _literal(name: ast.expr) -> str:
    return str(name.value) if isinstance(name, ast.Constant) else _ANY


def _is_named(value: ast.expr, names: Iterable[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function or module, without what lies in the functions inside it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, _FUNCTIONS):
            yield node
            yield from _inside(node)


def main(places: list[str]) -> int:
    found = list(Package(Path(__file__).parents[1] / "zeroweave").breaches(map(Path, places)))
    print("\n".join(found) or "every attribute is written by its owner")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
