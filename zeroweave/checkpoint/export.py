"""A model's values as Hugging Face lays them out: safetensors files and `model.safetensors.index.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import torch
from pydantic import ValidationError

from zeroweave.checkpoint import plain
from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import sync, write_file
from zeroweave.checkpoint.manifest import DTYPES, Strict
from zeroweave.checkpoint.reader import Reader
from zeroweave.checkpoint.staging import StagingFolder
from zeroweave.comm import rounding
from zeroweave.errors import CheckpointError
from zeroweave.parameters.weights import INDEX

_METADATA = {"format": "pt"}
"""transformers refuses files that do not say whose tensors they hold."""

CONFIGS: Final = ("config", "generation_config")
"""What models of transformers have, and `from_pretrained` reads: attributes, and files with the ending `.json`."""


class Model(Strict):
    """What a checkpoint tells of its model besides the tensors, as the value "model"."""

    dtypes: dict[str, str]
    """by NAME: the model's own; "param/NAME" may be a wider master"""
    aliases: dict[str, str]
    """other names of tied parameters, and the NAME of each"""
    configs: dict[str, str]
    """contents of the files, by name of `CONFIGS`"""


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
        raise CheckpointError(f"[ZW610] {path} is there already: export to a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as after:
        made = StagingFolder(path)
        after.callback(made.discard)
        files = _files(parts, shard_bytes)
        contents = iter(tensors)
        for name, members in files.items():
            with FileWriter(made.path / name, members, _METADATA) as file:
                for _ in members:
                    file.write(next(contents))
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(part.nbytes for part in parts)},
                "weight_map": {part.name: name for name, members in files.items() for part in members},
            }
            write_file(made.path / INDEX, json.dumps(index, indent=2).encode())
        finish(made.path)
        sync(made.path)
        made.path.rename(path)
        sync(path.parent)


def export_checkpoint(reader: Reader, path: Path, dtype: torch.dtype | None, shard_bytes: int) -> int:
    """Makes the folder `path` of what `reader` has, as `engine.export` does of an engine; one tensor at a time.

    Returns how many entries of extra state it leaves out: such a folder has no place for them.
    """
    manifest = reader.manifest
    try:
        model = Model.model_validate(plain.decode(manifest.values.get("model")))
    except ValidationError:
        raise CheckpointError(f"[ZW610] the checkpoint {manifest.tag!r} does not tell what an export needs") from None
    sources = {name.partition("/")[2]: name for name in manifest.tensors if name.startswith(("param/", "buffer/"))}
    sources |= {alias: sources[name] for alias, name in model.aliases.items() if name in sources}
    parts = []
    for key, name in sources.items():
        own = DTYPES.get(model.dtypes.get(model.aliases.get(key, key), ""), reader.dtype(name))
        entry = manifest.tensors[name]
        parts.append(Part(key, entry.shape, cast(own, dtype), 0, entry.numel))
    tensors = (rounding.cast(reader.whole(sources[part.name]), part.dtype) for part in parts)
    export(path, parts, tensors, shard_bytes, partial(_write_configs, model))
    extra = manifest.values.get("extra")
    return len(extra) if isinstance(extra, dict) else 0


def cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor of the dtype `own` is exported."""
    return wanted if wanted is not None and own.is_floating_point else own


def _write_configs(model: Model, folder: Path) -> None:
    for name in CONFIGS:
        if name in model.configs:
            write_file(folder / f"{name}.json", model.configs[name].encode())


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
