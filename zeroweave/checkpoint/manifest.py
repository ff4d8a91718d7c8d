"""The manifest of a checkpoint: which tensors it has, where their pieces are, and what every file must be.

It is one line of JSON. `checksum` comes first, and is the xxh3-128 of the manifest's bytes with zeros in its own place:
`{"checksum":"00000000000000000000000000000000","format":…`. So it vouches for itself, and by `files` for all the rest.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Final, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

from zeroweave.errors import CheckpointError, first_problem

NAME: Final = "manifest.json"
LARGEST: Final = 1 << 30
"""Bytes. A manifest above it is no manifest."""

_BEGIN: Final = b'{"checksum":"'
_ZEROS: Final = b"0" * 32

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""What safetensors calls them."""
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Field(gt=0, lt=1 << 63)]
PLAIN_NAME: Final = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""A pattern: of names of files and tags, none of which leads out of its folder."""
FileName = Annotated[str, Field(pattern=PLAIN_NAME)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Strict(BaseModel):
    """What is written as it is meant, and read as it is written: nothing is converted, and nothing may be left over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class File(Strict):
    """A file next to the manifest: its length, and the xxh3-128 of all of its bytes."""

    nbytes: Count
    xxh3_128: Hash


class Piece(Strict):
    """Elements `start` to `start + numel` of a flattened tensor, stored in `file` from its byte `begin` on."""

    file: FileName
    begin: Count
    start: Count
    numel: Positive


class Entry(Strict):
    """A tensor, whole: `dtype` as safetensors spells it, its pieces in the order of their elements."""

    shape: Annotated[tuple[Count, ...], Field(max_length=64, strict=False)]
    dtype: str
    pieces: Annotated[tuple[Piece, ...], Field(strict=False)]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Manifest(Strict):
    """All of a checkpoint but the contents of its tensors. `values`: encoded, see `plain`."""

    checksum: Hash = _ZEROS.decode()
    format: Literal["zeroweave checkpoint"] = "zeroweave checkpoint"
    version: Literal[2] = 2
    tag: FileName
    step: Count
    """optimizer steps that the run has made, with those that were skipped"""
    world: Positive
    stage: Count
    files: dict[FileName, File]
    tensors: dict[str, Entry]
    values: dict[str, Any]

    def sealed(self) -> bytes:
        """The file's content. CheckpointError for values that cannot be written down."""
        try:
            content = self.model_copy(update={"checksum": _ZEROS.decode()}).model_dump_json().encode()
        except PydanticSerializationError as error:
            raise CheckpointError(f"[ZW606] {NAME} cannot be written: {error}") from None
        if len(content) > LARGEST:
            raise CheckpointError(f"[ZW606] {NAME} would have {len(content)} bytes, and {LARGEST} at most can be read")
        return content.replace(_ZEROS, xxhash.xxh3_128_hexdigest(content).encode(), 1)


def parse(content: bytes) -> Manifest:
    """The manifest in a file's content. CheckpointError where it is not what was written, or contradicts itself."""
    checksum = content[len(_BEGIN) : len(_BEGIN) + 32]
    if not content.startswith(_BEGIN):
        raise CheckpointError(f"{NAME} is no manifest of a checkpoint")
    found = xxhash.xxh3_128_hexdigest(_BEGIN + _ZEROS + content[len(_BEGIN) + 32 :]).encode()
    if found != checksum:
        raise CheckpointError(f"{NAME} is damaged: its checksum is not that of its content")
    try:
        manifest = Manifest.model_validate(json.loads(content.decode(), object_pairs_hook=_no_twice))
    except ValidationError as error:
        raise CheckpointError(f"{NAME} is of no version that can be read: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME}: {error}") from None
    _check(manifest)
    return manifest


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping. ValueError where it has a key twice: other readers would take the other value."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"a mapping has a key twice among {', '.join(sorted(found)[:5])}")
    return found


def _check(manifest: Manifest) -> None:
    """Every tensor is covered once, by bytes that its files have and no other tensor."""
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in manifest.tensors.items():
        if (dtype := DTYPES.get(entry.dtype)) is None:
            raise CheckpointError(f"{NAME}: {name!r} has the unknown dtype {entry.dtype!r}")
        covered = 0
        for piece in entry.pieces:
            if piece.start != covered:
                raise CheckpointError(f"{NAME}: element {min(covered, piece.start)} of {name!r} is not there once")
            covered += piece.numel
            taken.setdefault(piece.file, []).append((piece.begin, piece.begin + piece.numel * dtype.itemsize, name))
        if covered != entry.numel:
            raise CheckpointError(f"{NAME}: {name!r} has {entry.numel} elements, and pieces of {covered}")
    for file, ranges in taken.items():
        if file not in manifest.files:
            raise CheckpointError(f"{NAME} has pieces in {file!r}, which is none of its files")
        end, before = 0, ""
        for start, stop, name in sorted(ranges):
            if start < end:
                raise CheckpointError(f"{NAME}: {before!r} and {name!r} overlap in {file!r}")
            if stop > manifest.files[file].nbytes:
                raise CheckpointError(f"{NAME}: {name!r} lies beyond the end of {file!r}")
            end, before = stop, name
