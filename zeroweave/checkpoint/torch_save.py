"""Files of `torch.save`, read without running code, and their weights as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from zeroweave.checkpoint.export import export
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.plain import is_dense
from zeroweave.errors import CheckpointError

_USUAL: Final = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put a model's state dict."""


class Inert:
    """Replaces a class, or a function, that PyTorch does not read by itself. `arguments`: what it was called with."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def _as_dict(*_: Any) -> dict[Any, Any]:
    """In the place of `defaultdict`, of which the file has the items."""
    return {}


def load(path: Path) -> Any:
    """What a file holds, its tensors in host memory. CheckpointError where it cannot be read without running code."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals(
            [(_as_dict if name == "collections.defaultdict" else Inert, name) for name in unknown]
        ):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # the file may be anything
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0][:500]
        raise CheckpointError(
            f"[ZW607] {path} is no file of torch.save that can be read: {type(error).__name__}: {reason}"
        ) from None


def convert(source: Path, folder: Path, key: str, shard_bytes: int) -> str:
    """Makes the new `folder` of safetensors of the state dict under `key` ("": the only one); what was done, in words.

    CheckpointError where there is none.
    """
    tensors = _state_dict(load(source), key)
    known = {name for name, value in tensors.items() if isinstance(value, torch.Tensor) and is_dense(value)}
    wrong = {name: value for name, value in tensors.items() if name not in known}
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
