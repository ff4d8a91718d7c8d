"""Files of `torch.save`, read without running what they name: classes that are not torch's become plain objects."""

from __future__ import annotations

import pickle
import pickletools
import types
import zipfile
from pathlib import Path
from typing import Any, Final

import torch

from zeroweave._torch.serialization import REBUILDERS
from zeroweave.errors import CheckpointError

_WORK: Final = 1 << 22
"""Operations of a pickle, with the values that are hashed as keys; and values in what it holds, each time it is met."""
_DEPTH: Final = 100
"""of tuples in tuples, whose hash is computed without regard to the stack"""
_BYTES_PER_BYTE: Final = 16
"""Bytes of tensors for each of the file, and `_BYTES` more: they may share memory, and be expanded."""
_BYTES: Final = 1 << 26


class Inert:
    """Stands for an object of a class that is not known here. `arguments`: what its constructor would have had."""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.arguments: tuple[Any, ...]

    def __call__(self, *_: Any, **__: Any) -> Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of what is a dictionary for its own code."""

    def extend(self, items: Any) -> None:
        """Of what is a list."""

    def append(self, item: Any) -> None:
        """Of what is a list."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, **options: Any) -> None:
        _check_pickle(file.getvalue())
        super().__init__(file, **options)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return REBUILDERS.get((module, name), Inert)


class _Node:
    """What is known of a value before it is made: tuples in tuples, and values in it as often as they are met."""

    __slots__ = ("depth", "weight")

    def __init__(self) -> None:
        self.depth, self.weight = 0, 1

    def take(self, parts: list[_Node]) -> None:
        for part in parts:
            self.depth = max(self.depth, part.depth + 1)
            self.weight += part.weight


def _check_pickle(content: bytes) -> None:
    """CheckpointError where a pickle would take more time, memory or stack than a checkpoint's. Nothing is made."""
    stack: list[_Node] = []
    marks: list[int] = []
    memo: dict[Any, _Node] = {}
    work, marker = 0, pickletools.markobject
    for opcode, argument, _ in pickletools.genops(content):
        work += 1
        name, before = opcode.name, opcode.stack_before
        if work > _WORK:
            raise CheckpointError(f"[ZW607] its pickle takes more than {_WORK} operations")
        if name == "MARK":
            marks.append(len(stack))
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name.endswith("PUT") or name == "MEMOIZE":
            index = len(memo) if argument is None else argument
            if index > len(content):
                raise CheckpointError("[ZW607] its pickle has a place that it does not need")
            memo[index] = stack[-1]
        elif not before:
            stack += [_Node() for _ in opcode.stack_after]
        else:
            start = marks.pop() - before.index(marker) if marker in before else len(stack) - len(before)
            if start < 0:
                raise CheckpointError("[ZW607] its pickle takes values that it does not have")
            taken = stack[start:]
            del stack[start:]
            if name in ("SETITEM", "SETITEMS", "DICT"):
                work += sum(key.weight for key in taken[name != "DICT" :: 2])
            elif name in ("ADDITEMS", "FROZENSET", "REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
                work += sum(node.weight for node in taken)
            if opcode.stack_after:
                grown = name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
                node = taken.pop(0) if grown else _Node()
                node.take(taken)
                stack.append(node)
                if node.depth > _DEPTH:
                    raise CheckpointError(f"[ZW607] its pickle is nested more than {_DEPTH} deep")


def _check_content(content: Any, nbytes: int) -> None:
    """CheckpointError where whoever goes through all values would not come to an end, or the tensors are too large."""
    left, values = _WORK, [content]
    while values:
        value = values.pop()
        left -= 1
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple | set):
            values += value
        elif isinstance(value, torch.Tensor):
            nbytes -= value.numel() * value.itemsize
        if left < len(values):
            raise CheckpointError(f"[ZW607] it holds more than {_WORK} values, or values that hold themselves")
    if nbytes < 0:
        raise CheckpointError("[ZW607] its tensors are far larger than the file")


def load(path: Path) -> Any:
    """What a file holds, its tensors in host memory, as far as they are read. CheckpointError where it is none."""
    reader = types.SimpleNamespace(Unpickler=_Unpickler, __name__="inert")
    try:
        if not path.is_file():
            raise CheckpointError("[ZW607] it is no regular file")
        size = path.stat().st_size
        with zipfile.ZipFile(path) as file:  # older files and TorchScript's are read in other ways, which call things
            names = [Path(name).name for name in file.namelist()]
            plain = all(
                (one.compress_type, one.compress_size) == (zipfile.ZIP_STORED, one.file_size) and one.file_size <= size
                for one in file.infolist()
            )
        if "data.pkl" not in names or "constants.pkl" in names or not plain:
            raise CheckpointError("[ZW607] it is an archive of another kind")
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=reader)
        _check_content(content, size * _BYTES_PER_BYTE + _BYTES)
        return content
    except CheckpointError as error:
        raise CheckpointError(f"[ZW607] {path} is no file of torch.save that can be read: {error}") from None
    except Exception as error:  # whatever the file is
        raise CheckpointError(f"[ZW607] {path} is no file of torch.save: {type(error).__name__}: {error}") from None
