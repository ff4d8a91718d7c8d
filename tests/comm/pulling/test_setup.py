"""Where gradients are pulled: where it is asked for, and can be; what fails on one rank is told on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from tests.support.harness import Pools
from zeroweave._torch.peers import Shared, where_handed_over
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pulling import setup
from zeroweave.comm.pulling.kernel import MOST_RANKS
from zeroweave.comm.pulling.setup import Asked, Gpu, Pulling, pulling, unfit
from zeroweave.comm.transport import Transport
from zeroweave.errors import ConfigError
from zeroweave.ranks.control import Control

CPU = torch.device("cpu")


def why(control: Control, asked: Asked, dtype: torch.dtype = torch.bfloat16) -> str:
    """What is said where nothing can be pulled."""
    found = pulling(asked, cast(Transport, None), control, CPU, Ledger(2, 0), [(1 << 20, dtype)] * 3)
    assert found.transport is None and found.room is None and found.nbytes == 0
    return found.why


def test_a_world_of_one_reduces_nothing() -> None:
    alone = Control(None, 0, 1)
    assert why(alone, "kernel") == "by kernel: transport.reductions is 'kernel'"
    assert why(alone, "pull") == "by kernel: nothing is reduced in a world of 1"


def between_ranks(asked: Asked, dtype: torch.dtype = torch.bfloat16) -> str:
    control = Control.over(None)
    try:
        return why(control, asked, dtype)
    except ConfigError as error:
        return str(error)
    finally:
        control.close()


def test_what_is_asked_for_and_cannot_be_is_an_error(pools: Pools) -> None:
    told = "transport.reductions is 'pull': {}. Set it to 'kernel'"
    assert pools(2).run(between_ranks, "kernel") == ["by kernel: transport.reductions is 'kernel'"] * 2
    assert pools(2).run(between_ranks, "pull") == [told.format("ranks compute on cpu")] * 2
    none = told.format("no gradients in bfloat16, float16 or float32 are reduced over all ranks")
    assert pools(2).run(between_ranks, "pull", torch.float64) == [none] * 2


# ---------------------------------------------------------------------- GPUs that can
def gpus(*changes: dict[str, Any]) -> list[Gpu]:
    uuids = tuple(f"GPU {rank}" for rank in range(len(changes)))
    return [Gpu("here", (9, 0), uuids[rank], uuids, "/tmp")._replace(**change) for rank, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"capability": (10, 0)}, ""),
        ({"sees": ("GPU 1", "GPU 0")}, ""),
        ({"host": "there"}, "rank {0} is on there, rank 0 on here: it works inside one machine"),
        ({"uuid": "GPU 0"}, "ranks 0 and {0} share a GPU"),
        ({"capability": (8, 0)}, "the GPU of rank {0} has compute capability 8.0: it takes 9.0"),
        ({"sees": ("GPU 1",)}, "the process of rank {0} does not see the GPU of rank 0 (CUDA_VISIBLE_DEVICES), and so"),
        ({"hands_over": "/var"}, "ranks 0 and {0} hand memory over in different folders (TMPDIR), or number processes"),
        ({"hands_over": "", "why_not": "too long"}, "rank {0}: too long"),
    ],
)
def test_gpus_are_of_one_machine_and_can_do_it(changed: dict[str, Any], told: str) -> None:
    found = unfit(gpus({}, changed))
    assert found.startswith(told.format(1)) and bool(found) == bool(told), found


def test_rank_0_is_looked_at_as_well() -> None:
    assert unfit(gpus({"capability": (8, 9)}, {})) == "the GPU of rank 0 has compute capability 8.9: it takes 9.0"
    assert unfit(gpus({"hands_over": "", "why_not": "too long"}, {})) == "rank 0: too long"


def test_more_ranks_than_a_kernel_reads_from_are_too_many() -> None:
    changes: list[dict[str, Any]] = [{}] * MOST_RANKS
    assert unfit(gpus(*changes)) == ""
    assert unfit(gpus(*changes, {})) == "there are 17 ranks, and a GPU pulls from 16 at most"


def test_where_memory_is_handed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    usual, why_not = where_handed_over(CPU)
    assert usual and not why_not and where_handed_over(CPU) == (usual, "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    other, why_not = where_handed_over(CPU)
    assert other and not why_not and other != usual
    monkeypatch.setenv("TMPDIR", "/" + "long" * 30)
    assert "too long for sockets: set TMPDIR to another one" in where_handed_over(CPU)[1]
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert where_handed_over(CPU)[1].startswith("sockets need a folder")


# ---------------------------------------------------------------------- what fails on one rank
class FakeRoom:
    """A room on a machine without cuBLAS."""

    def __init__(self, device: torch.device, left: int) -> None:
        assert left == 4

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


class FakeMapping:
    """What a rank reads of the others' memory: their signs, by what its own memory has; or, if `wrong`, its own."""

    def __init__(self, tensor: torch.Tensor, rank: int, wrong: bool) -> None:
        self._tensor, self._rank, self._wrong = tensor, rank, wrong

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert sizes == (1,) and dtype == torch.uint8
        return self._tensor[:1] + (0 if self._wrong else rank - self._rank)


def fail_on_rank_1(call: Callable[..., Any], control: Control) -> Callable[..., Any]:
    def failing(*arguments: Any, **keywords: Any) -> Any:
        if control.rank == 1:
            raise RuntimeError("there is none")
        return call(*arguments, **keywords)

    return failing


def set_up(fails: str) -> tuple[str, float]:
    """What is said at the end of a set-up in which something `fails` on rank 1, and after how many seconds."""
    control = Control.over(None, 600.0)

    def shared(tensors: list[torch.Tensor], name: str, rank: int, world: int, *rest: Any) -> list[Shared]:
        wrong = fails == "compare" and rank == 1
        return [Shared(each, (7,) * world, FakeMapping(each, rank, wrong)) for each in tensors]

    inner: Any = type("Inner", (), {"rank": control.rank, "world": control.world})()
    doubles: dict[str, Any] = {
        "Room": FakeRoom,
        "memory_for_peers": lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8),
        "shared": shared,
        "pull_kernel": lambda *arguments: arguments,
    }
    if fails in doubles:
        doubles[fails] = fail_on_rank_1(doubles[fails], control)
    with patch.multiple(setup, **doubles):
        begin = time.perf_counter()
        made = setup._make(inner, control, CPU, Ledger(2, 0), 1 << 20, [torch.bfloat16])
        seconds = time.perf_counter() - begin
    try:
        if isinstance(made, str):
            return made, seconds
        assert isinstance(made, Pulling) and made.transport is not None and made.room is not None
        flats = made.transport.flats
        assert not flats.view(0, 1, torch.uint8).item(), "the signs have gone"
        assert made.nbytes == 2 * (1 << 20)
        return made.why, seconds
    finally:
        control.close()


def test_it_is_set_up(pools: Pools) -> None:
    for told, _ in pools(2).run(set_up, "nothing"):
        assert told == "by pulling up to 1 MiB, and by kernel above"


@pytest.mark.parametrize("fails", ["Room", "memory_for_peers", "shared", "compare", "pull_kernel"])
def test_what_fails_on_one_rank_is_told_on_all_of_them_at_once(pools: Pools, fails: str) -> None:
    expected = "what came as memory of rank 0 is not that" if fails == "compare" else "there is none"
    for told, seconds in pools(2).run(set_up, fails):
        assert told == f"rank 1: {expected}"
        assert seconds < 150, "nobody has waited for another: that takes half of the deadline, 300 s"
