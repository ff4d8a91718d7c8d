"""Folders of checkpoints: a run may die at any line of what is done to one."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoint.small import ended_in, is_whole, lying, manifest_of, read, sealed, write
from zeroweave.checkpoint.folder import Folder
from zeroweave.errors import CheckpointError


def dies_at_each_line(path: Path, action: Callable[[], object], check: Callable[[], None]) -> int:
    """Restores `path`, runs `action` in a process that dies at its n-th line, and runs `check`; how often it died."""
    before = path.parent / "before"
    shutil.copytree(path, before)
    for deaths in itertools.count():
        lines = itertools.count()
        died = ended_in(action, lambda last=deaths, lines=lines: next(lines) == last)
        check()
        if not died:
            return deaths
        shutil.rmtree(path)
        shutil.copytree(before, path)
    raise AssertionError


def whole(path: Path) -> list[str]:
    """All tags, each of which can be read, and is what was written."""
    tags = Folder(path).tags()
    seeds = {"one": 1, "two": 2, "three": 3, "four": 4}
    assert all(is_whole(path, tag, seeds[tag]) for tag in tags)
    assert is_whole(path, None, seeds[Folder(path).latest()[0]])
    return tags


def test_dying_while_a_checkpoint_is_written(path: Path) -> None:
    seen = set()

    def check() -> None:
        seen.add((tuple(whole(path)), Folder(path).latest()[0]))

    deaths = dies_at_each_line(path, lambda: write(path, "two", 2, seed=2), check)
    assert seen == {(("one",), "one"), (("one", "two"), "one"), (("one", "two"), "two")}
    assert deaths > 40
    write(path, "three", 3, seed=3)  # beside what the dead have left
    assert whole(path)[-1:] == ["two"]


@pytest.mark.matrix
def test_dying_while_the_first_checkpoint_is_written(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()

    def check() -> None:
        try:
            assert is_whole(path, None, 2)
        except CheckpointError as error:
            assert "latest cannot be read: No such file" in str(error)

    assert dies_at_each_line(path, lambda: write(path, "two", 2, seed=2), check) > 40


@pytest.mark.matrix
def test_dying_while_old_ones_are_removed(path: Path) -> None:
    for step, tag in enumerate(("two", "three", "four"), start=2):
        write(path, tag, step, seed=step)

    def check() -> None:
        assert {"three", "four"} <= set(whole(path))
        assert Folder(path).latest()[0] == "four"

    assert dies_at_each_line(path, lambda: Folder(path).prune(2), check) > 40
    assert Folder(path).tags() == ["four", "three"]


@pytest.mark.parametrize(
    ("keep", "stay"),
    [((1, None), ["e"]), ((2, None), ["d", "e"]), ((1, 2), ["b", "d", "e"]), ((9, None), ["a", "b", "c", "d", "e"])],
)
def test_which_stay(tmp_path: Path, keep: tuple[int, int | None], stay: list[str]) -> None:
    for step, tag in enumerate("abcde", start=1):
        write(tmp_path, tag, step, seed=step)
    gone = Folder(tmp_path).prune(*keep)
    assert Folder(tmp_path).tags() == stay and sorted([*gone, *stay]) == list("abcde")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*stay, "latest"])


def test_the_latest_stays_although_others_are_of_later_steps(tmp_path: Path) -> None:
    write(tmp_path, "ahead", 9, seed=9)
    write(tmp_path, "back", 2, seed=2)
    write(tmp_path, "now", 3, seed=3)
    Folder(tmp_path).prune(1)
    assert Folder(tmp_path).tags() == ["ahead", "now"]


def test_what_is_no_checkpoint_is_not_removed(path: Path, tmp_path: Path) -> None:
    write(path, "two", 2, seed=2)
    (path / "notes").mkdir()
    (path / "notes" / "manifest.json").write_text("mine")
    (path / "weights.safetensors").write_text("mine")
    (path / ".two.partial").mkdir()
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, "zero", 0, seed=0)
    (path / "zero").symlink_to(elsewhere / "zero")
    Folder(path).prune(1)
    names = {p.name for p in path.iterdir()}
    assert names == {"two", "notes", "weights.safetensors", ".two.partial", "zero", "latest"}
    assert is_whole(elsewhere, "zero", 0)


def change(path: Path, tag: str, how: Callable[[bytes], bytes]) -> None:
    manifest = path / tag / "manifest.json"
    manifest.write_bytes(how(manifest.read_bytes()))


@pytest.mark.parametrize(
    "how",
    [
        lambda content: content[:-9] + b"x" + content[-8:],
        lambda content: content.replace(b'"step":4,', b'"step":9,', 1),
        lambda content: content.replace(b'"step":4,', b'"step":1,', 1),
        lambda content: content.replace(b'"tag":"d"', b'"tag":"e"', 1),
        lambda content: content[:100],
        lambda content: b"",
    ],
    ids=["at its end", "a later step", "an earlier step", "another tag", "short", "empty"],
)
def test_what_is_broken_stays_and_counts_for_nothing(tmp_path: Path, how: Callable[[bytes], bytes]) -> None:
    for step, tag in enumerate("abcde", start=1):
        write(tmp_path, tag, step, seed=step)
    change(tmp_path, "d", how)
    assert sorted(Folder(tmp_path).prune(2)) == ["a", "b"]
    assert Folder(tmp_path).tags() == ["c", "d", "e"]


@pytest.mark.parametrize(
    "changes",
    [{"step": -1}, {"files": {}}, {"world": 0}, {"version": 1}, {"tag": "other"}],
    ids=str,
)
def test_what_contradicts_itself_stays(tmp_path: Path, changes: dict[str, object]) -> None:
    for step, tag in enumerate("abc", start=1):
        write(tmp_path, tag, step, seed=step)
    lie = lying(Folder(tmp_path).manifest("a"), changes)
    for content in (lie, sealed(lie[45:].replace(b", ", b",").replace(b": ", b":"))):
        change(tmp_path, "a", lambda _, content=content: content)
        assert Folder(tmp_path).prune(2) == []
    change(tmp_path, "b", lambda content: sealed(content[45:-1] + b',"step":7}'))  # JSON's last one counts
    assert Folder(tmp_path).prune(1) == []


def test_a_manifest_that_another_program_has_written(tmp_path: Path) -> None:
    for step, tag in enumerate("abc", start=1):
        write(tmp_path, tag, step, seed=step)
        fields = Folder(tmp_path).manifest(tag).model_dump(mode="json", exclude={"checksum"})
        text = json.dumps({key: fields[key] for key in sorted(fields)})
        change(tmp_path, tag, lambda _, text=text: sealed(b'",' + text.encode()[1:]))
    latest = {"tag": "c", "manifest": Folder(tmp_path).manifest("c").checksum}
    (tmp_path / "latest").write_text(json.dumps(latest))
    assert Folder(tmp_path).prune(2) == ["a"] and Folder(tmp_path).tags() == ["b", "c"]


def test_two_savers_of_one_tag(path: Path) -> None:
    folder = Folder(path)
    first = folder.begin("two")
    with pytest.raises(CheckpointError, match="is being given a checkpoint 'two' by another saver"):
        folder.begin("two")
    folder.publish(first, manifest_of(first.path, "two", 2, seed=2))
    assert whole(path) == ["one", "two"] and folder.latest()[0] == "two"
    with pytest.raises(CheckpointError, match="has a checkpoint 'two' already"):
        folder.begin("two")


def test_savers_that_leave_the_tag_to_the_folder_get_different_ones(path: Path) -> None:
    together = threading.Barrier(4)

    def save(seed: int) -> list[str]:
        tags = []
        for _ in range(25):
            together.wait()
            partial = Folder(path).begin("step", again=True)
            tags.append(partial.place.name)
            Folder(path).publish(partial, manifest_of(partial.path, tags[-1], 2, seed))
        return tags

    with ThreadPoolExecutor(4) as threads:
        tags = [tag for told in threads.map(save, range(4)) for tag in told]
    assert len(set(tags)) == 100 and Folder(path).tags() == sorted([*tags, "one"])
    assert all(is_whole(path, tag, number // 25) for number, tag in enumerate(tags))
    assert sorted(p.name for p in path.iterdir()) == sorted([*tags, "latest", "one"])


def test_the_tag_of_a_saver_that_was_killed_is_free(path: Path) -> None:
    begun = threading.Event()

    def begin() -> None:
        Folder(path).begin("two")
        begun.set()
        Folder(path).tags()

    assert ended_in(begin, begun.is_set)
    assert (path / ".two.partial.lock").exists()
    assert Folder(path).begin("two", again=True).place.name == "two"


@pytest.mark.parametrize("make", ["directory", "file", "link", "loose link"])
def test_a_place_that_is_taken(path: Path, tmp_path: Path, make: str) -> None:
    folder, target = Folder(path), tmp_path / "target"
    partial = folder.begin("two")
    manifest = manifest_of(partial.path, "two", 2, seed=2)
    if make == "directory":
        (path / "two" / "mine").mkdir(parents=True)
    elif make == "file":
        (path / "two").write_text("mine")
    else:
        (path / "two").symlink_to(target)
    if make == "link":
        target.mkdir()
    with pytest.raises(CheckpointError, match="cannot be published"):
        folder.publish(partial, manifest)
    assert whole(path) == ["one"] and not list(tmp_path.glob("target/*"))


def test_latest_that_cannot_be_replaced_leaves_no_tag(path: Path) -> None:
    folder = Folder(path)
    partial = folder.begin("two")
    manifest = manifest_of(partial.path, "two", 2, seed=2)
    (path / "latest").unlink()
    (path / "latest").mkdir()
    with pytest.raises(OSError, match="latest"):
        folder.publish(partial, manifest)
    assert folder.tags() == ["one"] and is_whole(path, "one", 1)
    with pytest.raises(CheckpointError, match="latest is no regular file"):
        read(path)


def test_what_could_not_be_read_is_not_published(path: Path) -> None:
    folder = Folder(path)
    partial = folder.begin("two")
    manifest = manifest_of(partial.path, "two", 2, seed=2)
    for values in ({"deep": deep(300)}, {"text": "\ud800"}, {"number": 10**5000}):
        with pytest.raises(CheckpointError, match=r"manifest.json"):
            folder.publish(partial, manifest.model_copy(update={"values": values}))
    pieces = manifest.tensors["shared"].pieces[:1]
    short = manifest.tensors["shared"].model_copy(update={"pieces": pieces})
    with pytest.raises(CheckpointError, match="'shared' has 7 elements, and pieces of 3"):
        folder.publish(partial, manifest.model_copy(update={"tensors": {"shared": short}}))
    assert whole(path) == ["one"]


def deep(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "../one", "/a", "a/b", ".a", "-a", "latest", "a b", "é", "a" * 129, "a\n", None, 3]
)
def test_tags_that_are_none(path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
        Folder(path).begin(tag)
    if tag is not None:
        with pytest.raises(CheckpointError, match="cannot be a checkpoint's tag"):
            Folder(path).manifest(tag)
    assert sorted(p.name for p in path.iterdir()) == ["latest", "one"]


@pytest.mark.parametrize("tag", ["a", "A-1.0_x", "0", "step-00000200", "a" * 128, "manifest.json"])
def test_tags(path: Path, tag: str) -> None:
    write(path, tag, 2, seed=2)
    assert is_whole(path, tag, 2) and is_whole(path, None, 2)
