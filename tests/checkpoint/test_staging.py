"""What savers leave that have ended is removed, and nobody's work that lives: decided by locks alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Self

import pytest

from tests.checkpoint.small import OF_FOLDERS, is_whole, manifest_of, write
from tests.checkpoint.test_writer import not_as_root
from tests.support.marks import daily
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.staging import StagingFolder, sweep


def dead(number: int) -> str:
    return f".dead{number}.partial"


def leave(path: Path, number: int = 0) -> None:
    """What a saver leaves that is killed."""
    path.mkdir(exist_ok=True)
    (path / f"{dead(number)}.lock").touch()
    (path / dead(number)).mkdir(exist_ok=True)
    (path / dead(number) / "rank-00000.safetensors").write_text("half of it")


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


class Child:
    """A process that runs `action`. A context, which it does not outlive."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                action()
                os._exit(0)
            finally:
                os._exit(1)

    def ended(self) -> int:
        """Its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            os.kill(self.pid, signal.SIGKILL)


def slow_save(path: Path, how: int) -> None:
    """Is stopped, or killed, while it writes."""
    folder = Folder(path)
    partial = folder.begin("slow")
    manifest = manifest_of(partial.path, "slow", 2, seed=2)
    os.kill(os.getpid(), how)
    folder.publish(partial, manifest)


def test_a_saver_that_was_killed(tmp_path: Path) -> None:
    assert Child(lambda: slow_save(tmp_path, signal.SIGKILL)).ended() == -signal.SIGKILL
    assert names(tmp_path) == [".slow.partial", ".slow.partial.lock"]
    write(tmp_path, "one", 1, seed=1)
    assert names(tmp_path) == ["latest", "one"]


def test_a_saver_that_is_slow(tmp_path: Path) -> None:
    """It is stopped in its folder while another saves and removes, and goes on when that is over."""
    with Child(lambda: slow_save(tmp_path, signal.SIGSTOP)) as child:
        os.waitpid(child.pid, os.WUNTRACED)
        leave(tmp_path)
        write(tmp_path, "one", 1, seed=1)
        write(tmp_path, "two", 2, seed=2)
        Folder(tmp_path).prune(1)
        assert names(tmp_path) == [".slow.partial", ".slow.partial.lock", "latest", "two"]
        os.kill(child.pid, signal.SIGCONT)
        assert child.ended() == 0
    assert is_whole(tmp_path, "slow", 2) and is_whole(tmp_path, "two", 2)
    assert names(tmp_path) == ["latest", "slow", "two"]


def at_line(number: int, action: Callable[[], object], meanwhile: Callable[[], object]) -> bool:
    """Runs `action`, and `meanwhile` before the line of this number that it comes to; did it come so far?"""
    lines, done = count(), False

    def look(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if frame.f_globals.get("__name__") not in OF_FOLDERS:
            return None
        if event == "line" and next(lines) == number:
            done = True
            sys.settrace(None)
            meanwhile()
        return None if done else look

    sys.settrace(look)
    try:
        action()
    finally:
        sys.settrace(None)
    return done


@daily("each", [9], [1])
def test_another_saves_between_any_two_lines(tmp_path: Path, each: int) -> None:
    """Both remove what dead ones have left, and what they find of each other is alive."""
    for number in count(0, each):
        path = tmp_path / str(number)
        leave(path)
        left = names(path)

        def meanwhile(path: Path = path) -> None:
            leave(path, 1)
            write(path, "other", 1, seed=1)

        reached = at_line(number, lambda path=path: write(path, "one", 2, seed=2), meanwhile)
        assert is_whole(path, "one", 2) and (not reached or is_whole(path, "other", 1)), number
        assert {*names(path)} <= {"latest", "one", "other", *(name.replace("dead0", "dead1") for name in left)}, number
        if not reached:
            break
    assert number > 80


def test_another_sweeps_while_a_folder_is_made(tmp_path: Path) -> None:
    """The folder has its lock file all the same: if its process is killed, others find it."""
    for number in count():
        made: list[StagingFolder] = []
        reached = at_line(
            number, lambda made=made: made.append(StagingFolder(tmp_path / "one")), lambda: sweep(tmp_path)
        )
        assert names(tmp_path) == [".one.partial", ".one.partial.lock"], number
        made[0].discard()
        if not reached:
            break
    assert number > 10


def test_what_others_have_made_is_left(tmp_path: Path) -> None:
    """Without a lock of ours nobody knows whether it is used, and links lead elsewhere."""
    (tmp_path / dead(0)).mkdir()
    (tmp_path / ".mine.lock").touch()
    (tmp_path / "elsewhere").touch()
    (tmp_path / f"{dead(1)}.lock").symlink_to(tmp_path / "elsewhere")
    (tmp_path / dead(1)).mkdir()
    before = names(tmp_path)
    assert sweep(tmp_path) == [] and names(tmp_path) == before


def test_what_cannot_be_removed_is_told(tmp_path: Path) -> None:
    with TemporaryDirectory() as made:  # pytest's own are closed to others
        path = Path(made)
        leave(path)
        (path / f"{dead(0)}.lock").chmod(0o666)
        (path / dead(0)).chmod(0o555)
        path.chmod(0o777)
        with (
            not_as_root(),
            pytest.warns(UserWarning, match=r"that were killed cannot be removed: \.dead0\.partial"),
        ):
            write(path, "one", 1, seed=1)
        assert is_whole(path, None, 1)
        (path / dead(0)).chmod(0o755)
        write(path, "two", 2, seed=2)
        assert names(path) == ["latest", "one", "two"]


@pytest.mark.matrix
def test_a_folder_that_goes_while_it_is_removed(tmp_path: Path) -> None:
    """Whoever dies while it removes leaves that to the next."""
    for number in count():
        leave(tmp_path, number)
        ended = Child(lambda number=number: at_line(number, lambda: sweep(tmp_path), lambda: os._exit(17))).ended()
        assert ended in (0, 17) and sweep(tmp_path) == [] and names(tmp_path) == []
        if ended == 0:
            break
    assert number > 15


def test_one_that_was_published_is_nobodys(tmp_path: Path) -> None:
    partial = StagingFolder(tmp_path / "one")
    assert len(names(tmp_path)) == 2
    partial.path.rename(tmp_path / "one")
    partial.discard()
    partial.discard()
    assert names(tmp_path) == ["one"]


@pytest.mark.matrix
def test_a_file_system_without_locks(tmp_path: Path) -> None:
    """Savers save there; what they leave stays, since nobody can tell whether they live."""
    source, library = tmp_path / "no_flock.c", tmp_path / "no_flock.so"
    source.write_text("#include <errno.h>\nint flock(int fd, int how) { errno = ENOSYS; return -1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = f"""
from pathlib import Path
from tests.checkpoint.small import write
from tests.checkpoint.test_staging import leave
path = Path({str(tmp_path / "runs")!r})
leave(path)
write(path, "one", 1, seed=1)
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "LD_PRELOAD": str(library)}, check=True)
    assert is_whole(tmp_path / "runs", None, 1)
    assert names(tmp_path / "runs") == [dead(0), f"{dead(0)}.lock", "latest", "one"]
