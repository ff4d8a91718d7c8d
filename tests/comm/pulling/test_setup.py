"""Where gradients are pulled: where it is asked for, or gains something, and can be."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from tests.support.harness import Pools
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pulling.kernel import MOST_RANKS
from zeroweave.comm.pulling.setup import LEAST, Asked, Gpu, pulling, unfit
from zeroweave.comm.transport import Transport
from zeroweave.errors import ConfigError
from zeroweave.ranks.control import Control

CPU = torch.device("cpu")
ENOUGH = LEAST // 2
"""Elements of bfloat16."""


def why(
    control: Control,
    asked: Asked,
    numel: int = ENOUGH,
    dtype: torch.dtype = torch.bfloat16,
    compiles: bool = True,
    device: torch.device = CPU,
) -> str:
    """What is said where nothing can be pulled."""
    found = pulling(asked, cast(Transport, None), control, device, Ledger(2, 0), [(numel, dtype)] * 3, compiles)
    assert found.transport is None and found.room is None and found.nbytes == 0
    return found.why


def test_it_is_not_done_where_it_would_gain_nothing() -> None:
    alone = Control(None, 0, 1)
    assert why(alone, "kernel") == "by kernel: transport.reductions is 'kernel'"
    for asked in ("auto", "pull"):
        assert why(alone, asked) == "by kernel: nothing is reduced in a world of 1"
    small = "by kernel: most gradients lie in buckets of less than 16 MiB"
    assert why(alone, "auto", ENOUGH - 1) == small == why(alone, "auto", 2 * ENOUGH, torch.float64)
    assert why(alone, "auto", compiles=False).startswith("by kernel: nothing is compiled")


def between_ranks(asked: Asked, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> str:
    control = Control.over(None)
    try:
        return why(control, asked, dtype=dtype, device=torch.device(device))
    except ConfigError as error:
        return str(error)
    finally:
        control.close()


def test_what_is_asked_for_and_cannot_be_is_an_error(pools: Pools) -> None:
    assert pools(2).run(between_ranks, "auto") == ["by kernel: ranks compute on cpu"] * 2
    told = "transport.reductions is 'pull': {}. Set it to 'auto' or 'kernel'"
    assert pools(2).run(between_ranks, "pull") == [told.format("ranks compute on cpu")] * 2
    none = told.format("no gradients in bfloat16, float16 or float32 are reduced over all ranks")
    assert pools(2).run(between_ranks, "pull", "cpu", torch.float64) == [none] * 2


def gpus(*changes: dict[str, object]) -> list[Gpu]:
    return [Gpu("here", (9, 0), f"GPU {rank}", rank)._replace(**change) for rank, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"host": "there"}, "rank 1 is on there, rank 0 on here: it works inside one machine"),
        ({"uuid": "GPU 0"}, "ranks 0 and 1 share a GPU"),
        ({"capability": (8, 0)}, "the GPU of rank 1 has compute capability 8.0: it takes 9.0"),
        ({"number": 0}, "each process sees GPUs of its own (CUDA_VISIBLE_DEVICES), and so none tells whether they"),
    ],
)
def test_gpus_are_of_one_machine_and_can_do_it(changed: dict[str, object], told: str) -> None:
    for asked in ("auto", "pull"):
        found = unfit(asked, gpus({}, changed))
        assert found.startswith(told) and bool(found) == bool(told), found


def test_more_ranks_than_a_kernel_reads_from_are_too_many() -> None:
    changes: list[dict[str, object]] = [{}] * MOST_RANKS
    assert unfit("auto", gpus(*changes)) == ""
    assert unfit("auto", gpus(*changes, {})) == "there are 17 ranks, and a GPU pulls from 16 at most"


def test_on_gpus_that_nobody_has_measured_it_has_to_be_asked_for() -> None:
    newer = gpus({"capability": (10, 0)}, {"capability": (10, 0)})
    assert unfit("auto", newer) == "whether GPUs of compute capability 10.0 gain by it is not known"
    assert unfit("pull", newer) == ""
