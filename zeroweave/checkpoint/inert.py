"""Files of `torch.save`, read without running what they name: classes that are not torch's become plain objects."""

from __future__ import annotations

import pickle
import types
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from zeroweave._torch.serialization import REBUILDERS
from zeroweave.errors import CheckpointError


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
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return REBUILDERS.get((module, name), Inert)


def _load(file: IO[bytes], **options: Any) -> Any:
    return _Unpickler(file, **options).load()


def load(path: Path) -> Any:
    """What a file holds, its tensors in host memory, as far as they are read. CheckpointError where it is none."""
    reader = types.SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="inert")
    try:
        with zipfile.ZipFile(path) as file:  # older files and TorchScript's are read in other ways, which call things
            names = [Path(name).name for name in file.namelist()]
        if "data.pkl" not in names or "constants.pkl" in names:
            raise CheckpointError(f"{path} is no file of torch.save")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=reader)
    except CheckpointError:
        raise
    except Exception as error:  # whatever the file is
        raise CheckpointError(f"{path} is no file of torch.save: {type(error).__name__}: {error}") from None
