"""`python -m zeroweave.checkpoint.pickled`: weights that `torch.save` has written, as safetensors files.

A pickle can run any code while it is read. So nothing else here reads one, this is a process of its own, and it reads
with PyTorch's `weights_only`, which runs none, unless that is not enough.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from zeroweave.checkpoint.export import export
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.manifest import NAMES
from zeroweave.checkpoint.writer import words
from zeroweave.errors import CheckpointError

_USUAL: Final = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put a model's state dict."""


def start(source: Path, folder: Path, key: str | None, shard_bytes: int) -> int:
    """`convert` in a process of its own. Its exit code: 0, or 2 with a line on standard error."""
    arguments = [str(source), str(folder), key or "", str(shard_bytes)]
    return subprocess.run([sys.executable, "-m", __spec__.name, *arguments], check=False).returncode


def convert(source: Path, folder: Path, key: str, shard_bytes: int) -> str:
    """Makes the folder of the state dict under `key` of a file ("": the only one); what has been done, in words.

    CheckpointError where there is none, or none that safetensors can hold; whatever else reading a pickle can raise.
    """
    content, ran = _read(source)
    tensors = _state_dict(content, key)
    wrong = {name: value for name, value in tensors.items() if not _can_be_written(value)}
    if wrong:
        name, value = next(iter(wrong.items()))
        what = f"{value.layout} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CheckpointError(f"{len(wrong)} entries are no tensors that safetensors knows, such as {name!r}: {what}")
    parts = [Part.of(name, value) for name, value in tensors.items()]
    export(folder, parts, tensors.values(), shard_bytes, lambda _: None)
    how = "code in it was allowed to run" if ran else "no code in it has run"
    return f"wrote {len(parts)} tensors of {source} to {folder}; {how}"


def _read(source: Path) -> tuple[Any, bool]:
    """What the file holds, and whether its code was allowed to run."""
    mapped = zipfile.is_zipfile(source)
    try:
        return torch.load(source, map_location="cpu", mmap=mapped, weights_only=True), False
    except pickle.UnpicklingError:
        return torch.load(source, map_location="cpu", mmap=mapped, weights_only=False), True


def _state_dict(content: Any, key: str) -> dict[str, Any]:
    """The state dict under `key`, or the only one."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"the file holds a {type(content).__name__} and no dictionary")
    if key:
        if key not in content:
            raise CheckpointError(f"the file has no {key!r}; it has {', '.join(map(str, content))}")
        found = content[key]
    elif any(isinstance(value, torch.Tensor) for value in content.values()):
        found = content
    else:
        usual = [name for name in _USUAL if name in content]
        if len(usual) != 1:
            has = ", ".join(map(str, content))
            raise CheckpointError(f"name the entry that is the model's state dict by --key; the file has {has}")
        found = content[usual[0]]
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found):
        raise CheckpointError("there is no state dict: a dictionary of tensors by name")
    return dict(found)


def _can_be_written(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in NAMES


if __name__ == "__main__":
    try:
        print(convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    except Exception as error:  # whatever the file is
        print(f"zeroweave: {sys.argv[1]} was not imported: {words(error)}", file=sys.stderr)
        sys.exit(2)
