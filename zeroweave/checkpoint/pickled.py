"""`python -m zeroweave.checkpoint.pickled`: checkpoints that others have written with `torch.save`, as safetensors.

A pickle can run any code while it is read. So nothing else here reads one, this is a process of its own, and `inert`
calls nothing that a file names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from zeroweave.checkpoint import deepspeed, inert
from zeroweave.checkpoint.export import export
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import NAMES
from zeroweave.checkpoint.writer import Saving, words
from zeroweave.errors import CheckpointError
from zeroweave.ranks.control import Control

_SHOWN: Final = 2000
"""Characters of an error: what a file names may be of any length."""
_USUAL: Final = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put a model's state dict."""


def start(source: Path, folder: Path, key: str | None, optimizer: str, shard_bytes: int) -> int:
    """`convert` in a process of its own. Its exit code: 0, or 2 with a line on standard error."""
    arguments = [str(source), str(folder), key or "", optimizer, str(shard_bytes)]
    return subprocess.run([sys.executable, "-m", __spec__.name, *arguments], check=False).returncode


def convert(source: Path, folder: Path, key: str, optimizer: str, shard_bytes: int) -> str:
    """Of a folder of DeepSpeed's makes a checkpoint in `folder`, whose optimizer is of the class `optimizer`; of the
    state dict under `key` of a file ("": the only one) the new `folder` of safetensors. What has been done, in words.

    CheckpointError where there is none, or none that can be read without running code.
    """
    if source.is_dir():
        found = deepspeed.read(source, optimizer)
        whole = Control()
        Saving(Folder(folder), found.tag, found.step, found.stage, lambda: found.content, whole, None).finish()
        left_out = f", without {', '.join(found.left_out)}" if found.left_out else ""
        return f"wrote the checkpoint {found.tag} of {source} to {folder}{left_out}"
    tensors = _state_dict(inert.load(source), key)
    wrong = {name: value for name, value in tensors.items() if not _can_be_written(value)}
    if wrong:
        name, value = next(iter(wrong.items()))
        what = f"{value.layout} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CheckpointError(
            f"[ZW607] {len(wrong)} entries are no tensors that safetensors knows, such as {name!r}: {what}"
        )
    parts = [Part.of(name, value) for name, value in tensors.items()]
    export(folder, parts, tensors.values(), shard_bytes, lambda _: None)
    return f"wrote {len(parts)} tensors of {source} to {folder}"


def _state_dict(content: Any, key: str) -> dict[str, Any]:
    """The state dict under `key`, or the only one."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"[ZW607] the file holds a {type(content).__name__} and no dictionary")
    if key:
        if key not in content:
            raise CheckpointError(f"[ZW607] the file has no {key!r}; it has {', '.join(map(str, content))}")
        found = content[key]
    elif any(isinstance(value, torch.Tensor) for value in content.values()):
        found = content
    else:
        usual = [name for name in _USUAL if name in content]
        if len(usual) != 1:
            has = ", ".join(map(str, content))
            raise CheckpointError(f"[ZW607] name the entry that is the model's state dict by --key; the file has {has}")
        found = content[usual[0]]
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found):
        raise CheckpointError("[ZW607] there is no state dict: a dictionary of tensors by name")
    return dict(found)


def _can_be_written(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in NAMES


if __name__ == "__main__":
    try:
        print(convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])))
    except Exception as error:  # whatever the file is
        print(f"zeroweave: {sys.argv[1]} was not imported: {words(error)[:_SHOWN]}", file=sys.stderr)
        sys.exit(2)
