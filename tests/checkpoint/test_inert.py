"""Pickles that run no code can still take all time, memory or stack: each is refused with the file's name."""

from __future__ import annotations

import os
import pickle
import resource
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import daily
from zeroweave.checkpoint import deepspeed
from zeroweave.checkpoint.inert import load
from zeroweave.checkpoint.pickled import convert
from zeroweave.errors import CheckpointError

HEAD = b"\x80\x02"


def nested(depth: int) -> bytes:
    return HEAD + b"}" + b")" + b"\x85" * depth + b"K\x01s."


def shared(depth: int) -> bytes:
    """A tuple of itself twice, `depth` times, as a key: its hash takes 2 ** depth steps."""
    twice = b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(depth))
    return HEAD + b"})" + twice + b"K\x01s."


def shared_in_a_set(depth: int) -> bytes:
    """The same, put into a list that was remembered before, of which a set is made."""
    twice = b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(depth))
    return HEAD + b"]q\xfa0h\xfa)" + twice + b"acbuiltins\nset\nh\xfa\x85R."


def doubled(depth: int) -> bytes:
    """A list of itself twice, `depth` times: whoever goes through all of it takes 2 ** depth steps."""
    twice = b"".join(b"q%c0]h%cah%ca" % (n, n, n) for n in range(depth))
    return HEAD + b"}X\x01\x00\x00\x00a]" + twice + b"s."


HOSTILE = {
    "nested": (nested(200_000), "nested more than"),
    "shared": (shared(60), "operations"),
    "shared in a set": (shared_in_a_set(60), "operations"),
    "doubled": (doubled(60), "values"),
    "itself": (HEAD + b"]q\x00h\x00a.", "values"),
    "lists": (HEAD + b"]" * 5_000_000 + b".", "operations"),
    "a far place": (HEAD + b"]r\xff\xff\xff\x7f.", "place"),
    "no pickle": (b"\xff\xfe", "ValueError"),
    "nothing": (HEAD + b".", "does not have"),
}


def archive(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return path


@daily(
    "kind",
    ["nested", "shared", "shared in a set", "doubled", "a far place"],
    ["itself", "lists", "no pickle", "nothing"],
)
def test_what_takes_too_much(tmp_path: Path, kind: str) -> None:
    content, message = HOSTILE[kind]
    path = archive(tmp_path / "file.pt", content)
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=f"{path} is no file of torch.save.*{message}"):
        load(path)
    assert time.process_time() - begin < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB


def test_a_zip_bomb(tmp_path: Path) -> None:
    path = archive(tmp_path / "file.pt", HEAD + b"]" + b"0]" * 5_000_000 + b".", zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="archive of another kind"):
        load(path)


def test_tensors_that_are_expanded(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"small": torch.ones(1).expand(1000)}, path)
    assert load(path)["small"].sum() == 1000
    torch.save({"large": torch.ones(1).expand(1 << 40)}, path)
    with pytest.raises(CheckpointError, match="far larger than the file"):
        load(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        load(tmp_path / "pipe")


def test_what_people_save_is_read(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    content = {
        "model": OrderedDict((f"layer.{n}.weight", weight) for n in range(2000)),
        "random": [list(range(10_000)), (3, tuple(range(625)), None)],
        "optimizer": {"state": {n: {"step": torch.tensor(1.0)} for n in range(100)}, (0, ("a", "b")): 4},
        "deep": deep,
    }
    path = tmp_path / "file.pt"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        torch.save(content, path, pickle_protocol=protocol)
        found = load(path)
        assert found["random"] == content["random"] and found["deep"] == deep
        assert found["optimizer"][0, ("a", "b")] == 4
        assert all(torch.equal(value, weight) for value in found["model"].values())
    assert "wrote 2000 tensors" in convert(path, tmp_path / "out", "model", "AdamW", 1 << 30)


@pytest.mark.parametrize("tag", ["../other", "/etc", "..", ".", "", "a/b"])
def test_latest_names_a_folder_beside_it(tmp_path: Path, tag: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="no folder beside it"):
        deepspeed.read(tmp_path / "runs", "AdamW")
