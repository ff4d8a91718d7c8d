"""Folders that were made to do harm: no code runs, and nothing outside is read or touched."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.checkpoint.small import ALONE, Runs, is_whole, lying, read, sealed
from zeroweave.checkpoint import random_numbers
from zeroweave.checkpoint.compatibility import Compatibility, Wanted
from zeroweave.checkpoint.files import bytes_of
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import parse
from zeroweave.checkpoint.reader import opened
from zeroweave.errors import CheckpointError

PLACES = ("latest", "one/manifest.json", "one/rank-00000.safetensors", "one/rank-00001.safetensors")
SECRET = "a secret of 0123456789"
MIB = 1 << 20


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that nobody has to read or to write."""
    file = tmp_path / "outside"
    file.write_text(SECRET)
    return file


def refusal(path: Path, tag: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path, tag)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def republished(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The manifest with a change, under right checksums, also in `latest`."""
    manifest = parse((path / "one" / "manifest.json").read_bytes())
    fields = manifest.model_dump(mode="json", exclude={"checksum"})
    change(fields)
    replaced(path, lying(manifest, fields))


def replaced(path: Path, content: bytes) -> None:
    """Another manifest, which `latest` names."""
    (path / "one" / "manifest.json").write_bytes(content)
    (path / "latest").write_text(json.dumps({"tag": "one", "manifest": content[13:45].decode()}))


# ---------------------------------------------------------------------- pickles
@pytest.mark.parametrize("place", PLACES)
def test_pickles_are_bytes(path: Path, tmp_path: Path, place: str) -> None:
    mark = tmp_path / "ran"
    pickles = [pickle.dumps(Runs(mark), protocol) for protocol in range(6)]
    torch.save(Runs(mark), tmp_path / "saved")
    for content in [*pickles, (tmp_path / "saved").read_bytes()]:
        (path / place).write_bytes(content)
        assert Path(place).name in refusal(path)
    assert not mark.exists()
    pickle.loads(pickles[0])
    assert mark.exists()


def test_a_pickle_that_the_manifest_vouches_for_is_numbers(path: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    content = pickle.dumps(Runs(mark)).ljust((path / PLACES[2]).stat().st_size, b".")
    (path / PLACES[2]).write_bytes(content)
    told = {"nbytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    republished(path, lambda fields: fields["files"].update({Path(PLACES[2]).name: told}))
    tensors, _ = read(path)
    assert tensors["first"].dtype == torch.bfloat16 and not mark.exists()


# ---------------------------------------------------------------------- what is no file
@pytest.mark.parametrize("place", [*PLACES, "one"])
def test_symbolic_links_are_not_followed(path: Path, outside: Path, tmp_path: Path, place: str) -> None:
    target = outside
    if place != "latest":  # what it leads to would be right
        target = tmp_path / "moved"
        (path / place).rename(target)
    else:
        (path / place).unlink()
    (path / place).symlink_to(target)
    assert "symbolic link" in refusal(path)
    if place != "latest":
        assert Path(place).name in refusal(path, "one")
    assert outside.read_text() == SECRET


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["fifo", "fifo with a writer", "folder", "socket"])
def test_what_is_no_regular_file(path: Path, place: str, kind: str) -> None:
    (path / place).unlink()
    writer = None
    if kind.startswith("fifo"):
        os.mkfifo(path / place)
        writer = os.open(path / place, os.O_RDWR) if kind != "fifo" else None
    elif kind == "folder":
        (path / place).mkdir()
    else:
        here = os.getcwd()
        os.chdir((path / place).parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(Path(place).name)
        os.chdir(here)
    assert Path(place).name in refusal(path)
    if writer is not None:
        os.close(writer)


# ---------------------------------------------------------------------- manifests with right checksums
def test_a_key_that_is_there_twice(path: Path) -> None:
    content = (path / "one" / "manifest.json").read_bytes()
    for old in (b'"step":1', b'"F32"', b'"start":0'):
        assert old in content
        twice = b'"step":1,"step":2' if old == b'"step":1' else b'"F32","dtype":"F64"' if old == b'"F32"' else old * 2
        replaced(path, sealed((content[45:]).replace(old, twice.replace(b'0"start', b'0,"start'), 1)))
        assert "twice" in refusal(path)


# ---------------------------------------------------------------------- places
@pytest.mark.parametrize("name", ["../../outside", "../outside", "/etc/hostname", "sub/../../../outside"])
def test_nothing_outside_is_named(path: Path, outside: Path, name: str) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"].pop("rank-00000.safetensors")
        for entry in fields["tensors"].values():
            for piece in entry["pieces"]:
                piece["file"] = piece["file"].replace("rank-00000.safetensors", name)

    republished(path, change)
    assert "of no version that can be read: " in refusal(path)
    (path / "latest").write_text(json.dumps({"tag": name, "manifest": "0" * 32}))
    assert "latest is damaged" in refusal(path)
    assert "cannot be a checkpoint's tag" in refusal(path, name)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 4000,
        b'{"tag":' * 500,
        b"null",
        b"3",
        b'"one"',
        b"[]",
        b"{}",
        b'{"tag":"one"}',
        b'{"tag":["one"],"manifest":"0"}',
        b'{"tag":"one","manifest":null}',
        b'{"tag":"one","manifest":"' + b"0" * 31 + b'"}',
        b'{"tag":"one","manifest":"' + b"0" * 32 + b'","more":1}',
        b"\xff\xfe",
        b"1" * 4096,
        b" " * 5000,
    ],
)
def test_what_latest_cannot_be(path: Path, content: bytes) -> None:
    (path / "latest").write_bytes(content)
    assert "latest" in refusal(path) and is_whole(path, "one", 1)


# ---------------------------------------------------------------------- lengths
def test_a_header_that_lies_moves_nothing(path: Path) -> None:
    """The manifest alone says where tensors lie. A header that it does not vouch for is another file."""
    place = path / PLACES[2]
    content = place.read_bytes()
    for lie in (b"\xff" * 8, (1 << 60).to_bytes(8, "little"), bytes(8)):
        changed = lie + content[8:]
        place.write_bytes(changed)
        assert "rank-00000.safetensors is damaged" in refusal(path)
        told = {"nbytes": len(changed), "xxh3_128": xxhash.xxh3_128_hexdigest(changed)}
        before = (path / "one" / "manifest.json").read_bytes()
        republished(path, lambda fields, told=told: fields["files"].update({place.name: told}))
        assert is_whole(path, None, 1)
        replaced(path, before)


@pytest.mark.parametrize("nbytes", [0, 1, 2**40, 2**63 - 1])
def test_lengths_that_lie(path: Path, nbytes: int) -> None:
    republished(path, lambda fields: fields["files"]["rank-00000.safetensors"].update(nbytes=nbytes))
    assert "rank-00000.safetensors" in refusal(path)


def peak(action: Callable[[], object]) -> int:
    """Bytes that this process has more while `action` runs, at its most."""

    def resident(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS:")
    action()
    return resident("VmHWM:") - before


HEAD = b'","format":"zeroweave checkpoint","version":2,"tag":"one","step":1,"world":1,"stage":1,"files":{},'
ENTRY = HEAD + b'"values":{},"tensors":{"x":{"shape":[1],"dtype":"F32","pieces":['
BOMBS: dict[str, Callable[[], bytes]] = {
    "lists in each other": lambda: HEAD + b'"tensors":{},"values":{"a":' + b"[" * MIB,
    "closed lists in each other": lambda: HEAD + b'"tensors":{},"values":{"a":' + b"[" * MIB + b"]" * MIB + b"}}",
    "2^60 elements": lambda: ENTRY.replace(b'"shape":[1]', b'"shape":[1152921504606846976]') + b"]}}}",
    "2^4000 elements": lambda: (
        ENTRY.replace(b'"shape":[1]', b'"shape":[' + b"4611686018427387904," * 63 + b"1]") + b"]}}}"
    ),
    "a long number": lambda: HEAD + b'"tensors":{},"values":{"a":' + b"9" * MIB + b"}}",
}


@pytest.mark.parametrize("what", list(BOMBS))
def test_manifests_that_want_memory(path: Path, what: str) -> None:
    content = sealed(BOMBS[what]())
    replaced(path, content)
    del content
    assert peak(lambda: refusal(path)) < 200 * MIB


@pytest.mark.parametrize("place", PLACES)
def test_files_of_a_tebibyte(path: Path, place: str) -> None:
    """Which take no room on the disk."""
    try:
        os.truncate(path / place, 1 << 40)
    except OSError:
        pytest.skip("no file is that long here")
    assert peak(lambda: refusal(path)) < 50 * MIB


# ---------------------------------------------------------------------- values
RUN = {
    "run": {"micro_steps": 1, "skipped_steps": 0},
    "client": {},
    "loss_scale": {"value": 1.0, "good_steps": 0, "patience": 1},
    "optimizer": {"kind": "SGD", "groups": [{"params": ["w"], "options": {"lr": 0.1}}]},
    "lr_scheduler": {"kind": "StepLR", "state": {}},
}


def lies() -> Iterator[dict[str, Any]]:
    for name in ("run", "client", "loss_scale"):
        yield {key: value for key, value in RUN.items() if key != name}
    for name in RUN:
        for value in ([], None, 3, "x", {"~tuple": []}, {"~what": 1}, {"~tensor": ["F32", [2**60], ""]}):
            if (name, value) not in (("optimizer", None), ("lr_scheduler", None)):
                yield {**RUN, name: value}
    for name in ("param/w", "client/0", "", 3, [], None):
        yield {**RUN, "client": {"a": {"~stored": name}}}
    for micro_steps in (-1, 1.5, "1", None, 2**63):
        yield {**RUN, "run": {"micro_steps": micro_steps, "skipped_steps": 0}}
    for scale in (0.0, -1.0, "1", None, {"~float": "nan"}):
        yield {**RUN, "loss_scale": {"value": scale, "good_steps": 0, "patience": 1}}
    for groups in (None, [3], [{}], [{"params": "w", "options": {}}], [{"params": [3], "options": {}}]):
        yield {**RUN, "optimizer": {"kind": "SGD", "groups": groups}}
    yield {**RUN, "optimizer": {"kind": "SGD", "groups": [{"params": ["other"], "options": {}}]}}
    yield {**RUN, "optimizer": {"kind": "SGD", "groups": []}}


def test_values_that_no_engine_has_written(path: Path) -> None:
    wanted = Wanted({}, {}, ("SGD", [["w"]]), "StepLR")

    def fit(values: dict[str, Any]) -> None:
        republished(path, lambda fields: fields.update(values=values, tensors={}))
        with opened(Folder(path), None, ALONE) as reader:
            Compatibility(reader.manifest, wanted, True).check(ALONE)

    fit(RUN)
    for values in lies():
        with pytest.raises(CheckpointError):
            fit(values)


@pytest.mark.parametrize("name", ["python", "numpy", "cpu"])
@pytest.mark.parametrize("state", [None, (), (3, (1, 2), None), torch.zeros(3), "MT19937", ("MT19937", 1)])
def test_random_numbers_that_are_none(name: str, state: Any) -> None:
    device = torch.device("cpu")
    before = random_numbers.states(device)
    other = {**before, "python": random.Random(3).getstate()}
    with pytest.raises(CheckpointError, match="random numbers"):
        random_numbers.restore({**other, name: state}, device)
    assert random.getstate() == before["python"]
    assert torch.equal(torch.get_rng_state(), before["cpu"]) and len(bytes_of(before["cpu"])) > 0
