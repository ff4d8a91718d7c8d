"""A model's values as Hugging Face lays them out: safetensors files and `model.safetensors.index.json`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import discard, sync, write_file
from zeroweave.errors import CheckpointError

_METADATA = {"format": "pt"}
"""transformers refuses files that do not say whose tensors they hold."""


def export(
    path: Path,
    parts: Sequence[Part],
    tensors: Iterable[torch.Tensor],
    shard_bytes: int,
    finish: Callable[[Path], object],
) -> None:
    """Makes the folder `path` of whole tensors, which `parts` describe in their order; local.

    A file begins where the one before would have more than `shard_bytes`. `finish(folder)` adds what else belongs
    there. CheckpointError where the folder is there already, OSError where it cannot be written; then nothing is left.
    """
    if path.exists():
        raise CheckpointError(f"{path} is there already: export to a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    with ExitStack() as after:
        after.callback(discard, partial)
        files = _files(parts, shard_bytes)
        contents = iter(tensors)
        for name, members in files.items():
            with FileWriter(partial / name, members, _METADATA) as file:
                for _ in members:
                    file.write(next(contents))
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(part.nbytes for part in parts)},
                "weight_map": {part.name: name for name, members in files.items() for part in members},
            }
            write_file(partial / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
        finish(partial)
        sync(partial)
        partial.rename(path)
        sync(path.parent)


def _files(parts: Sequence[Part], shard_bytes: int) -> dict[str, list[Part]]:
    """File name -> what it holds."""
    groups: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        if groups[-1] and filled + part.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}
