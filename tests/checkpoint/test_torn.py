"""Torn checkpoints: whatever happens to the bytes of one, reading it says so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.small import is_whole, read, write
from zeroweave.errors import CheckpointError

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
PAGE = 64
"""Bytes that are zeroed at once: the files are small."""
CUTS, FLIPS, PAGES = 60, 90, 30


def spread(size: int, count: int) -> list[int]:
    """`count` places of `size`, the first and the last among them."""
    return sorted({index * (size - 1) // (count - 1) for index in range(count)})


def damaged(content: bytes) -> Iterator[tuple[str, bytes]]:
    """What can become of a file's content, each with what happened."""
    for end in spread(len(content), CUTS):
        yield f"truncated to {end}", content[:end]
    for index, place in enumerate(spread(len(content), FLIPS)):
        flipped = content[place] ^ 1 << index % 8
        yield f"bit {index % 8} of byte {place} flipped", content[:place] + bytes([flipped]) + content[place + 1 :]
    for start in spread(len(content), PAGES):
        zeros = bytes(len(content[start : start + PAGE]))
        yield f"zeroed at {start}", content[:start] + zeros + content[start + PAGE :]
    yield "duplicated", content * 2
    yield "one byte longer", content + b"\0"
    yield "all ones", b"\xff" * len(content)


def refusal(path: Path, tag: str | None) -> str:
    """What reading says; "" where it does not complain."""
    try:
        read(path, tag)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints of two ranks; the second is the latest."""
    write(tmp_path, "one", 1, seed=1)
    write(tmp_path, "two", 2, seed=2)
    assert is_whole(tmp_path, "one", 1) and is_whole(tmp_path, None, 2)
    return tmp_path


def test_no_damage_of_a_file_is_silent(folder: Path) -> None:
    cases, silent = 0, []
    places = [(folder / "latest", None), *((folder / tag / name, tag) for tag in ("one", "two") for name in FILES)]
    for file, tag in places:
        whole = file.read_bytes()
        for what, content in damaged(whole):
            if content == whole:
                continue
            file.write_bytes(content)
            cases += 1
            # of the latest checkpoint both ways of asking for it
            if file.name not in refusal(folder, tag) or (tag == "two" and file.name not in refusal(folder, None)):
                silent.append((str(file.relative_to(folder)), what))
        file.unlink()
        cases += 1
        if file.name not in refusal(folder, tag):
            silent.append((str(file), "deleted"))
        file.write_bytes(whole)
    print(f"torn files: {cases} cases, {len(silent)} silent")
    assert silent == [] and cases >= 1000
    assert is_whole(folder, "one", 1) and is_whole(folder, None, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("two/rank-00000.safetensors", "two/rank-00001.safetensors"),
        ("two/rank-00000.safetensors", "one/rank-00000.safetensors"),
        ("two/rank-00001.safetensors", "one/rank-00001.safetensors"),
        ("two/manifest.json", "one/manifest.json"),
        ("two/manifest.json", "two/rank-00000.safetensors"),
        ("latest", "two/manifest.json"),
        ("one", "two"),
    ],
)
@pytest.mark.parametrize("tag", [None, "two"])
def test_what_is_swapped_is_noticed(folder: Path, first: str, second: str, tag: str | None) -> None:
    if (first, tag) == ("latest", "two"):
        tag = None
    (folder / first).rename(folder / "aside")
    (folder / second).rename(folder / first)
    (folder / "aside").rename(folder / second)
    with pytest.raises(CheckpointError):
        read(folder, tag)


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_from_another_checkpoint_is_noticed(folder: Path, name: str) -> None:
    shutil.copy(folder / "one" / name, folder / "two" / name)
    with pytest.raises(CheckpointError, match=name):
        read(folder)
    assert is_whole(folder, "one", 1)


def test_an_older_manifest_under_the_same_tag_is_not_the_latest(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, "two", 2, seed=3)
    shutil.rmtree(folder / "two")
    shutil.copytree(elsewhere / "two", folder / "two")
    with pytest.raises(CheckpointError, match="that of another one"):
        read(folder)
    assert is_whole(folder, "two", 3)


def test_what_is_broken_is_told_with_what_else_there_is(folder: Path) -> None:
    (folder / "two" / FILES[1]).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    said = str(caught.value)
    assert all(word in said for word in ("'two'", str(folder), FILES[1], "0 bytes instead of", "by its tag: one")), said
    shutil.rmtree(folder / "one")
    with pytest.raises(CheckpointError, match="there is no other one"):
        read(folder)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"latest cannot be read: No such file.*no other one"):
        read(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"'a'.*No such file"):
        read(tmp_path, "a")
    assert not (tmp_path / "none").exists()
