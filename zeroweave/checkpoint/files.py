"""A rank's file: safetensors, written as a stream and hashed on the way, read in pieces.

The safetensors library writes and reads whole files. A rank that offloads its states, or has them on a device, has no
memory to hold all of them at once in host memory, so tensors go into the file one after the other. What is written is
a file like any other of the format: eight bytes that give the length of a JSON header, the header, the tensors.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Self

import torch
import xxhash

from zeroweave.checkpoint.manifest import NAMES, File
from zeroweave.errors import CheckpointError

_CHUNK: Final = 8 << 20
"""Bytes that are hashed at once."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor [n] on the CPU."""
    return tensor.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Part:
    """What a file has of one tensor: `numel` elements from `start` on, flattened.

    CheckpointError where its dtype has no name in safetensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    numel: int

    def __post_init__(self) -> None:
        if self.dtype not in NAMES:
            raise CheckpointError(f"[ZW606] {self.name!r} is of {self.dtype}, which safetensors does not know")

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Part:
        """All of a tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype, 0, tensor.numel())

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class FileWriter:
    """Writes the tensors of `parts`, in this order. `begins`: the byte at which each begins.

    A context: at its end the file is on the disk, and `written` says what it is. OSError where the disk is full or the
    file may not be written.
    """

    def __init__(self, path: Path, parts: Sequence[Part], metadata: Mapping[str, str] | None = None) -> None:
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        ends = list(accumulate((part.nbytes for part in parts), initial=0))
        for part, place in zip(parts, pairwise(ends), strict=True):
            shape = part.shape if math.prod(part.shape) == part.numel else (part.numel,)  # a piece is flat
            header[part.name] = {"dtype": NAMES[part.dtype], "shape": shape, "data_offsets": place}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.begins = {part.name: len(self._head) + begin for part, begin in zip(parts, ends, strict=False)}
        self._path, self._parts = path, iter(parts)
        self._part: Part | None = None
        self._left = 0
        """elements of it that are still to come"""
        self._hash, self._nbytes = xxhash.xxh3_128(), 0
        self._file: io.FileIO | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("xb", buffering=0)
        self._put(memoryview(self._head))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        with naming(self._path):
            try:
                if kind is None:
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()

    @property
    def written(self) -> File:
        """What the file is."""
        return File(nbytes=self._nbytes, xxh3_128=self._hash.hexdigest())

    def write(self, tensor: torch.Tensor) -> None:
        """The next part, or the next piece of it, in host memory."""
        if not self._left:
            self._part = next(self._parts)
            self._left = self._part.numel
        assert self._part is not None and tensor.dtype == self._part.dtype, self._part
        self._left -= tensor.numel()
        assert self._left >= 0, self._part.name
        self._put(bytes_of(tensor.detach().contiguous().reshape(-1)))

    def _put(self, data: memoryview) -> None:
        assert self._file is not None
        self._nbytes += len(data)
        while data:
            chunk = data[:_CHUNK]
            self._hash.update(chunk)
            data = data[len(chunk) :]
            with naming(self._path):
                while chunk:
                    chunk = chunk[self._file.write(chunk) :]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside names the file: those of writing, as on a full disk, name none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def open_file(path: Path, shown: str) -> tuple[int, int]:
    """Opens a regular file, no link: its descriptor and length. CheckpointError, which calls it `shown`, for others."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"[ZW601] {shown} cannot be read: {error.strerror}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointError(f"{shown} is no regular file")
    return fd, status.st_size


class FileReader:
    """Reads a file that `expected` describes. CheckpointError, which names the file, where it is not that one."""

    def __init__(self, path: Path, expected: File) -> None:
        self._name, self._expected = path.name, expected
        self._fd, nbytes = open_file(path, path.name)
        if nbytes != expected.nbytes:
            self.close()
            raise CheckpointError(f"{path.name} has {nbytes} bytes instead of {expected.nbytes}")

    def check(self) -> None:
        """Reads all of it. CheckpointError where a byte is not what was written."""
        digest, chunk, left = xxhash.xxh3_128(), bytearray(_CHUNK), self._expected.nbytes
        while left:
            view = memoryview(chunk)[: min(left, _CHUNK)]
            self._fill(view, self._expected.nbytes - left)
            digest.update(view)
            left -= len(view)
        if digest.hexdigest() != self._expected.xxh3_128:
            raise CheckpointError(f"{self._name} is damaged: its hash is not that of what was written")

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Fills a contiguous tensor in host memory with the bytes from `begin` on."""
        self._fill(bytes_of(out), begin)

    def _fill(self, view: memoryview, begin: int) -> None:
        while view:
            got = os.preadv(self._fd, [view], begin)
            if not got:
                raise OSError(errno.EIO, "ended while it was read", self._name)
            view, begin = view[got:], begin + got

    def close(self) -> None:
        os.close(self._fd)
