"""Where the optimizer's whole state may go: a decision from numbers, and the numbers of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zeroweave.optim.state_memory import Need, Room, available, decide, on_device, shortage

MIB, GIB = 2**20, 2**30
NEED = Need(host=60 * GIB, device=64 * GIB, passing=2 * GIB)


def rooms(*figures: tuple[str, float, float | None]) -> list[Room]:
    """In GiB: (machine, host, device)."""
    return [Room(m, int(host * GIB), None if device is None else int(device * GIB)) for m, host, device in figures]


@pytest.mark.parametrize(
    ("figures", "place"),
    [
        ([("a", 500, 80), ("a", 500, 80)], "device"),
        ([("a", 0, 80), ("a", 0, 80)], "device"),  # host memory does not matter then
        ([("a", 500, 80), ("a", 500, 66)], "host"),  # 66 GiB, less a twentieth, are too few on one of them
        ([("a", 500, 4), ("a", 500, 4)], "host"),
        ([("a", 500, 4), ("a", 500, 1)], None),  # a bucket does not pass through the device of rank 1
        ([("a", 100, 4), ("a", 100, 4)], None),  # one would fit, both do not
        ([("a", 100, 4), ("b", 100, 4)], "host"),  # on different machines they do
        ([("a", 127, 4), ("a", 126, 4)], None),  # 120 GiB and a twentieth, by the lowest figure of a machine
        ([("a", 127, 4), ("a", 127, 4)], "host"),
        ([("a", 500, 4), ("b", 50, 80)], None),
        ([("a", 66, None)], "host"),
        ([("a", 65, None)], None),  # what passes is in host memory, too, where the engine computes there
    ],
)
def test_where_it_goes(figures: list[tuple[str, float, float | None]], place: str | None) -> None:
    assert decide(rooms(*figures), [NEED] * len(figures)) == place


def test_ranks_may_need_different_amounts() -> None:
    small = Need(host=GIB, device=GIB, passing=0)
    assert decide(rooms(("a", 0, 80), ("a", 0, 2)), [NEED, small]) == "device"
    assert decide(rooms(("a", 0, 2), ("a", 0, 80)), [NEED, small]) is None
    assert decide(rooms(("a", 70, 3), ("a", 70, 3)), [NEED, small]) == "host"
    assert decide(rooms(("a", 0, 0), ("a", 0, 0)), [Need(), Need()]) == "device", "an optimizer without a state"


def test_the_shortage_in_words() -> None:
    small = Need(host=GIB, device=GIB, passing=0)
    text = shortage(rooms(("a", 300, 8), ("b", 30.5, 12), ("b", 31, 4)), [small, NEED, NEED])
    assert "60 GiB on each rank" in text and "the GPU of rank 2 has 4 GiB" in text, text
    assert "a machine has 30.5 GiB of host memory, 2 ranks there need 120 GiB" in text, text
    assert "GPU" not in shortage(rooms(("a", 3, None)), [NEED])


def test_what_is_needed() -> None:
    need = Need.of([100, 11 * MIB, 30 * MIB], [5, 50, 20])
    assert need == (100 + 41 * MIB, 768 + 12 * MIB + 30 * MIB, 100)
    assert Need.of([], []) == Need()


def segments(nbytes: int, count: int) -> int:
    """What segments of the allocator's sizes hold `count` tensors of `nbytes`: 2 MiB, 20 MiB, or one for each."""
    size = -(-nbytes // 512) * 512
    segment = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
    return -(-count // (segment // size)) * segment


@pytest.mark.parametrize(
    "nbytes", [4, 700 * 1024, MIB, 5.1 * MIB, 6.7 * MIB, 9.9 * MIB, 10 * MIB, 10.1 * MIB, 333 * MIB]
)
def test_the_bound_holds_for_what_an_allocator_takes(nbytes: float) -> None:
    count, size = 7200, int(nbytes)
    assert segments(size, count) <= count * on_device(size) + 20 * MIB
    assert size <= on_device(size)


# ---------------------------------------------------------------------- this machine
def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path / "proc", meminfo="MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    return tmp_path


def test_without_limits_it_is_what_the_kernel_says(machine: Path) -> None:
    assert available(machine) == 5000 * 1024
    assert available(machine / "nothing") > 2**60, "no figure is no limit"


def test_a_batch_jobs_limit_counts(machine: Path) -> None:
    """Version 2: that of the process's group, or of one around it; files in the page cache are no use of memory."""
    write(machine / "proc/self", cgroup="0::/jobs/7\n")
    groups = machine / "sys/fs/cgroup"
    write(groups / "jobs/7", memory__max="max\n", memory__current="10\n", memory__stat="inactive_file 0\n")
    write(groups / "jobs", memory__max="100000\n", memory__current="90000\n", memory__stat="anon 1\ninactive_file 7\n")
    assert available(machine) == 10007
    write(groups / "jobs/7", memory__max="9000\n", memory__current="9500\n")
    assert available(machine) == 0


def test_a_containers_limit_counts(machine: Path) -> None:
    """Version 1: the group has another path outside, which the container does not see."""
    write(machine / "proc/self", cgroup="5:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/\n")
    write(
        machine / "sys/fs/cgroup/memory",
        memory__limit_in_bytes="30000\n",
        memory__usage_in_bytes="20000\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 500\n",
    )
    assert available(machine) == 10500


def test_the_room_of_this_machine() -> None:
    here = Room.now(torch.device("cpu"))
    assert here.machine and here.device is None
    assert 0 < here.host <= available() * 2, "in bytes"
