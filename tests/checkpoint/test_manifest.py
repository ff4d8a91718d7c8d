"""Manifests: what they say of themselves, and what they may not say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.checkpoint.small import lying, manifest_of
from zeroweave.checkpoint.manifest import Entry, File, Manifest, Piece, parse
from zeroweave.errors import CheckpointError

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return manifest_of(tmp_path, "a", 3, seed=0)


def test_it_comes_back(manifest: Manifest) -> None:
    found = parse(manifest.sealed())
    assert found.model_copy(update={"checksum": manifest.checksum}) == manifest
    assert found.checksum != manifest.checksum and parse(found.sealed()) == found


def test_the_checksum_is_first_and_of_all_the_rest(manifest: Manifest) -> None:
    content = manifest.sealed()
    digits = content[13:45]
    assert content.startswith(b'{"checksum":"') and b"\n" not in content
    assert xxhash.xxh3_128_hexdigest(content.replace(digits, b"0" * 32)).encode() == digits
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        with pytest.raises(CheckpointError, match=r"manifest.json is"):
            parse(changed)


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\x80\x04.", b'{"checksum":"', b'{"checksum":"' + b"0" * 40])
def test_what_is_none(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"manifest.json is"):
        parse(content)


def entry(*pieces: tuple[str, int, int, int], shape: tuple[int, ...], dtype: str = "F32") -> Entry:
    made = tuple(Piece(file=file, begin=begin, start=start, numel=numel) for file, begin, start, numel in pieces)
    return Entry(shape=shape, dtype=dtype, pieces=made)


CONTRADICTIONS: dict[str, tuple[Entry, str]] = {
    "a gap": (entry((FIRST, 0, 0, 2), (FIRST, 16, 3, 2), shape=(5,)), "element 2 of 'x' is not there once"),
    "twice": (entry((FIRST, 0, 0, 2), (FIRST, 16, 1, 2), shape=(3,)), "element 1 of 'x' is not there once"),
    "not from the first": (entry((FIRST, 0, 1, 2), shape=(3,)), "element 0 of 'x' is not there once"),
    "out of order": (entry((FIRST, 0, 2, 2), (FIRST, 16, 0, 2), shape=(4,)), "element 0 of 'x' is not there once"),
    "too few": (entry((FIRST, 0, 0, 2), shape=(3,)), "'x' has 3 elements, and pieces of 2"),
    "too many": (entry((FIRST, 0, 0, 2), shape=()), "'x' has 1 elements, and pieces of 2"),
    "nothing": (entry(shape=(2**60,)), f"'x' has {2**60} elements, and pieces of 0"),
    "beyond the end": (entry((FIRST, 2**40, 0, 2), shape=(2,)), "'x' lies beyond the end"),
    "across the end": (entry((FIRST, 1999, 0, 2), shape=(2,)), "'x' lies beyond the end"),
    "huge": (entry((FIRST, 0, 0, 2**60), shape=(2**60,)), "'x' lies beyond the end"),
    "huge in all": (entry((FIRST, 0, 0, 2**62), shape=(2**31, 2**31)), "'x' lies beyond the end"),
    "itself": (entry((FIRST, 8, 0, 2), (FIRST, 12, 2, 2), shape=(4,)), "'x' and 'x' overlap"),
    "no such file": (entry(("rank-00007.safetensors", 0, 0, 2), shape=(2,)), "none of its files"),
    "no such dtype": (entry((FIRST, 0, 0, 2), shape=(2,), dtype="F99"), "unknown dtype 'F99'"),
    "a dtype of code": (entry((FIRST, 0, 0, 2), shape=(2,), dtype="object"), "unknown dtype"),
}


@pytest.mark.parametrize("what", list(CONTRADICTIONS))
def test_contradictions(what: str) -> None:
    wrong, message = CONTRADICTIONS[what]
    files = {FIRST: File(nbytes=2000, xxh3_128="0" * 32)}
    made = Manifest(tag="a", step=0, world=1, stage=1, files=files, tensors={"x": wrong}, values={})
    with pytest.raises(CheckpointError, match=message):
        parse(made.sealed())


def test_tensors_do_not_share_bytes(manifest: Manifest) -> None:
    (piece,) = manifest.tensors["first"].pieces
    moved = piece.model_copy(update={"begin": piece.begin - 1})
    wrong = manifest.tensors["first"].model_copy(update={"pieces": (moved,)})
    content = manifest.model_copy(update={"tensors": {**manifest.tensors, "first": wrong}}).sealed()
    with pytest.raises(CheckpointError, match=r"'shared' and 'first' overlap in 'rank-00000.safetensors'"):
        parse(content)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "a\n", "x" * 129, "a\\b", "é"]
)
def test_names_that_are_no_files_beside_it(manifest: Manifest, name: str) -> None:
    pieces = [{"file": name, "begin": 0, "start": 0, "numel": 1}]
    for changes in (
        {"files": {name: {"nbytes": 0, "xxh3_128": "0" * 32}}},
        {"tensors": {"x": {"shape": [1], "dtype": "F32", "pieces": pieces}}},
        {"tag": name},
    ):
        with pytest.raises(CheckpointError, match="of no version that can be read"):
            parse(lying(manifest, changes))


NUMBERS: list[Any] = [-1, 2**63, 2**64, 10**400, 1.5, 1e300, "1", True, None, [1], math.nan]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: repr(number)[:20])
def test_numbers_that_are_no_counts(manifest: Manifest, number: Any) -> None:
    whole = {"file": FIRST, "begin": 0, "start": 0, "numel": 1}
    entries = [
        {"shape": [1], "dtype": "F32", "pieces": [{**whole, key: number}]} for key in ("begin", "start", "numel")
    ]
    entries.append({"shape": [number], "dtype": "F32", "pieces": []})
    lies: list[dict[str, Any]] = [{"tensors": {"x": wrong}} for wrong in entries]
    lies += [{"files": {FIRST: {"nbytes": number, "xxh3_128": "0" * 32}}}]
    lies += [{"step": number}, {"world": number}, {"stage": number}]
    for changes in lies:
        with pytest.raises(CheckpointError, match="of no version that can be read"):
            parse(lying(manifest, changes))


@pytest.mark.parametrize("changes", [{"version": 1}, {"format": "another"}, {"world": 0}, {"more": 1}, {"tensors": []}])
def test_other_versions(manifest: Manifest, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="of no version that can be read"):
        parse(lying(manifest, changes))


@pytest.mark.parametrize("values", [b'"\xff"', b"[" * 500_000 + b"]" * 500_000])
def test_what_is_no_text_or_nested_too_deeply(manifest: Manifest, values: bytes) -> None:
    content = manifest.sealed().replace(b'"values":{', b'"values":{"a":' + values + b",", 1).replace(b",}", b"}")
    checksum = xxhash.xxh3_128_hexdigest(content[:13] + b"0" * 32 + content[45:]).encode()
    with pytest.raises(CheckpointError, match=r"manifest.json: "):
        parse(content[:13] + checksum + content[45:])
