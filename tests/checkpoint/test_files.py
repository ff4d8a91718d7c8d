"""Files of tensors: those of the safetensors library, written as a stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from zeroweave.checkpoint.files import FileReader, FileWriter, Part
from zeroweave.checkpoint.manifest import DTYPES, File
from zeroweave.errors import CheckpointError


def of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(6).view(2, 3).to(dtype)


TENSORS = {
    **{f"{name} é": of(dtype) for name, dtype in DTYPES.items()},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(3, 0),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "expanded": torch.ones(1).expand(4),
}


def written(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> FileWriter:
    with FileWriter(path, [Part.of(name, value) for name, value in tensors.items()], metadata) as file:
        for value in tensors.values():
            file.write(value)
    return file


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = (value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_library_reads_them(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "a.safetensors"
    written(path, TENSORS, metadata)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], value) for name, value in TENSORS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata


def test_what_the_writer_says_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    file = written(path, TENSORS)
    content = path.read_bytes()
    assert file.written == File(nbytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    for name, value in TENSORS.items():
        begin, end = (8 + length + place for place in header[name]["data_offsets"])
        assert file.begins[name] == begin
        assert content[begin:end] == value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_parts_of_tensors(tmp_path: Path) -> None:
    path, value = tmp_path / "a.safetensors", torch.arange(12.0)
    with FileWriter(path, [Part("x", (3, 4), torch.float32, 5, 2)]) as file:
        file.write(value[5:7])
    assert torch.equal(load_file(path)["x"], value[5:7])
    reader = FileReader(path, file.written)
    reader.check()
    out = torch.empty(1)
    reader.read(file.begins["x"] + 4, out)
    assert out.item() == 6.0
    reader.close()


def test_tensors_in_pieces(tmp_path: Path) -> None:
    tensors = {name: torch.arange(10.0) for name in ("first", "second")}
    whole = written(tmp_path / "whole", tensors)
    with FileWriter(tmp_path / "pieces", [Part.of(name, value) for name, value in tensors.items()]) as pieces:
        for value in tensors.values():
            for piece in value.split(4):
                pieces.write(piece)
    assert pieces.written == whole.written


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        written(path, {"x": torch.ones(1)})
    assert path.read_bytes() == b"mine"


def test_dtypes_that_have_no_name() -> None:
    with pytest.raises(CheckpointError, match=r"'x' is of torch.complex128"):
        Part.of("x", torch.zeros(1, dtype=torch.complex128))


def test_reading_another_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    expected = written(path, {"x": torch.ones(3)}).written
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    reader = FileReader(path, expected)
    with pytest.raises(CheckpointError, match=r"a.safetensors is damaged"):
        reader.check()
    path.write_bytes(b"")  # the same file, which is open
    with pytest.raises(OSError, match="ended while it was read"):
        reader.check()
    reader.close()
    with pytest.raises(CheckpointError, match="0 bytes instead of"):
        FileReader(path, expected)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a.safetensors cannot be read: No such file"):
        FileReader(path, expected)
