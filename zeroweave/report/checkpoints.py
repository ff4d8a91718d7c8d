"""`zeroweave ckpt inspect`: what a checkpoint holds, for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zeroweave.checkpoint import plain
from zeroweave.checkpoint.manifest import DTYPES, Entry, Manifest
from zeroweave.checkpoint.offline import located
from zeroweave.report.tables import size


def inspect(path: Path) -> None:
    """Prints what the manifest of a checkpoint tells, or of the latest in a folder. CheckpointError without one."""
    folder, tag = located(path)
    manifest = folder.manifest(tag)
    # A file or a pipe has no width to which names would have to be broken.
    console = Console(width=None if sys.stdout.isatty() else 1000, markup=False, emoji=False, highlight=False)
    for line in _summary(manifest):
        console.print(_harmless(line))
    if others := [other for other in folder.tags() if other != manifest.tag]:
        console.print(f"also in {folder.path}: {', '.join(others)}")
    console.print(_table(manifest.tensors))


def _harmless(text: str) -> str:
    """Without sequences that a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _summary(manifest: Manifest) -> Iterator[str]:
    values = manifest.values
    yield f"{manifest.tag}: step {manifest.step}, stage {manifest.stage}, ranks: {manifest.world}"
    total = sum(map(nbytes, manifest.tensors.values()))
    on_disk = sum(file.nbytes for file in manifest.files.values())
    yield f"tensors: {len(manifest.tensors)}, {size(total)}; files: {len(manifest.files)}, {size(on_disk)}"
    match values.get("optimizer"):
        case {"kind": kind, "groups": [*groups]}:
            yield f"optimizer: {kind}, groups of parameters: {len(groups)}"
    if "data" in values:
        own = any(name.endswith("/data") for name in values)
        yield f"data: {'a position for each rank' if own else 'one position for all ranks'}"
    match plain.decode(values.get("client"), lambda _: torch.empty(0)):
        case {**client} if client:
            yield f"client_state: {', '.join(map(str, client))}"


def _table(tensors: Mapping[str, Entry]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for head in ("dtype", "shape", "size", "pieces"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, entry in tensors.items():
        shape = " × ".join(map(str, entry.shape)) or "scalar"
        table.add_row(_harmless(name), entry.dtype, shape, size(nbytes(entry)), str(len(entry.pieces)))
    return table


def nbytes(entry: Entry) -> int:
    """Bytes of a whole tensor."""
    return entry.numel * DTYPES[entry.dtype].itemsize
