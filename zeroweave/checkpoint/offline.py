"""Checkpoints without an engine and without other ranks: found, verified and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from typing import Final

import torch

from zeroweave.checkpoint import manifest as manifests
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.reader import Reader, opened
from zeroweave.checkpoint.writer import words
from zeroweave.errors import CheckpointError
from zeroweave.ranks.control import Control

_CHUNK: Final = 1 << 22
"""Elements that are compared at once."""


def located(path: Path) -> tuple[Folder, str | None]:
    """What a path means: a checkpoint and its folder, or a folder of checkpoints and None."""
    path = path.absolute()
    return (Folder(path.parent), path.name) if _is_one(path) else (Folder(path), None)


def _is_one(path: Path) -> bool:
    """True for a checkpoint, also a broken one."""
    return (path / manifests.NAME).exists() or any(path.glob("rank-*.safetensors"))


def verified(path: Path) -> AbstractContextManager[Reader]:
    """A checkpoint, or the latest of a folder, when all of its bytes have been checked. CheckpointError where they are
    not what was written.
    """
    return opened(*located(path), Control())


def verify(path: Path) -> Iterator[tuple[str, str]]:
    """Reads every byte of a checkpoint, or of all in a folder: the tag of each, and what is wrong, or "".

    A folder's `latest` is read, too. CheckpointError where there is nothing to read.
    """
    folder, tag = located(path)
    tags = sorted(found.name for found in folder.path.iterdir() if found.name[0] != "." and _is_one(found))
    if tag is not None:
        tags = [tag]
    if not tags:
        raise CheckpointError(f"[ZW601] there is no checkpoint in {path}")
    for each in tags:
        yield each, _failure(folder.path / each)
    if tag is None:
        yield "latest", _failure(folder.path, only_manifest=True)


def _failure(path: Path, only_manifest: bool = False) -> str:
    try:
        if only_manifest:
            Folder(path).manifest()
        else:
            with verified(path):
                pass
    except (CheckpointError, OSError) as error:
        return words(error)
    return ""


def differences(a: Reader, b: Reader) -> Iterator[str]:
    """What of two checkpoints is not the same, in words; tensors by their bits, at any stages and worlds.

    What belongs to single ranks is compared where both have the same number of them.
    """
    one, other = a.manifest, b.manifest
    if one.step != other.step:
        yield f"step: {one.step} and {other.step}"
    same_world = one.world == other.world
    for name in _names(one.values.keys() | other.values.keys(), same_world):
        if name not in one.values or name not in other.values:
            yield f"value {name}: only in {'the first' if name in one.values else 'the second'}"
        elif one.values[name] != other.values[name]:
            yield f"value {name}: differs"
    for name in _names(one.tensors.keys() | other.tensors.keys(), same_world):
        if name not in one.tensors or name not in other.tensors:
            yield f"{name}: only in {'the first' if name in one.tensors else 'the second'}"
        elif told := _difference(a, b, name):
            yield f"{name}: {told}"


def _names(names: set[str], same_world: bool) -> list[str]:
    return sorted(name for name in names if same_world or not name.startswith("rank/"))


def _difference(a: Reader, b: Reader, name: str) -> str:
    kinds = [f"{list(r.manifest.tensors[name].shape)} {r.manifest.tensors[name].dtype}" for r in (a, b)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    numel, count, most = a.manifest.tensors[name].numel, 0, 0.0
    for start in range(0, numel, _CHUNK):
        mine, theirs = (r.read(name, start, min(_CHUNK, numel - start)) for r in (a, b))
        bits = [tensor.view(torch.uint8).view(-1, tensor.itemsize) for tensor in (mine, theirs)]
        unequal = (bits[0] != bits[1]).any(1)
        if unequal.any():
            count += int(unequal.sum())
            if mine.dtype.is_floating_point:
                distance = (mine[unequal].double() - theirs[unequal].double()).abs().nan_to_num(nan=inf, posinf=inf)
                most = max(most, float(distance.max()))
    by = f", by at most {most:.3g}" if a.dtype(name).is_floating_point else ""
    return f"{count} of {numel} elements differ{by}" if count else ""
