"""The agreement between ranks: what it decides, and what it says about ranks that differ or do not come."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.patience import patient
from zeroweave.errors import AgreementError, RankFailure
from zeroweave.ranks.control import Agreement, Control, Decision, decide


def test_decisions() -> None:
    one = Agreement(step=3, count=7, hash=2**63 + 1, flags=b"\x01\x00\x80", candidate=9)
    other = Agreement(3, 7, 2**63 + 1, b"\x02\x00\x01", 9)
    assert decide({0: one, 1: other}) == Decision(b"\x03\x00\x81", adopt=True)
    assert not decide({0: one, 1: Agreement(3, 7, 2**63 + 1, b"\0\0\0", 8)}).adopt
    assert not decide({0: Agreement(3, 7, 1, b"", 0), 1: Agreement(3, 7, 1, b"", 0)}).adopt
    nothing = Agreement(3, 7, 1, b"", 0)
    assert not decide({0: nothing, 1: nothing}).adopt
    assert not decide({0: one, 1: other}).nonfinite and decide({0: one, 1: replace(other, nonfinite=True)}).nonfinite


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Agreement(3, 8, 5, b"\0"), "rank 0 issued 7 .*rank 2 issued 8"),
        (Agreement(3, 7, 6, b"\0"), "rank 0 issued 7 .*rank 2 issued 7 .*in another order"),
        (Agreement(4, 7, 5, b"\0"), "rank 0 is at step 3, rank 2 at step 4"),
        (Agreement(3, 7, 5, b"\0\0"), "rank 0 tells of 1 bytes of flags, rank 2 of 2"),
    ],
)
def test_differences_name_two_ranks_and_the_figures(other: Agreement, words: str) -> None:
    same = Agreement(3, 7, 5, b"\0")
    with pytest.raises(AgreementError, match=f"(?i){words}"):
        decide({0: same, 2: other})


def test_a_world_of_one_agrees_with_itself() -> None:
    control = Control.over(None)
    assert control.agree(Agreement(0, 1, 2, b"\x05", 3)) == Decision(b"\x05", adopt=True)
    assert control.all_gather_object("x") == ["x"] and control.broadcast_object("y") == "y"
    control.barrier()
    control.close()
    control.close()


def test_a_larger_world_needs_a_coordinator() -> None:
    with pytest.raises(ValueError, match="coordinator"):
        Control(0, 2)


def exchange() -> dict[str, object]:
    control = Control.over(None, deadline_seconds=30)
    rank = control.rank
    try:
        sizes = (0, 1, 4096, 3_000_000)
        return {
            "equal": all(
                control.all_gather_bytes(bytes([rank + 1]) * size)
                == [bytes([r + 1]) * size for r in range(control.world)]
                for size in sizes
            ),
            "uneven": [len(data) for data in control.all_gather_bytes(b"x" * (rank * 5000))],
            "objects": control.all_gather_object({"rank": rank}),
            "broadcast": control.broadcast_object(f"from {rank}"),
            "decision": control.agree(Agreement(1, 2, 3, bytes([1 << rank, 0]), 4)),
            "one is not finite": control.agree(Agreement(1, 2, 3, b"", nonfinite=rank == 1)).nonfinite,
            "many": len(control.agree(Agreement(2, 2, 3, bytes(50_000), 4)).flags),
        }
    finally:
        control.close()


@pytest.mark.matrix
@pytest.mark.oldest
@daily("world", [2], [3])
def test_exchanges(pools: Pools, world: int) -> None:
    for result in pools(world).run(exchange):
        assert result == {
            "equal": True,
            "uneven": [5000 * rank for rank in range(world)],
            "objects": [{"rank": rank} for rank in range(world)],
            "broadcast": "from 0",
            "decision": Decision(bytes([2**world - 1, 0]), adopt=True),
            "one is not finite": True,
            "many": 50_000,
        }


def differ() -> list[str]:
    """Two agreements that fail on all ranks, and one that succeeds after them."""
    control = Control.over(None, deadline_seconds=30)
    texts = []
    try:
        for mine in (Agreement(1, 2 + control.rank, 3, b"\0"), Agreement(2 + control.rank, 2, 3, b"\0")):
            try:
                control.agree(mine)
            except AgreementError as error:
                texts.append(str(error))
        assert control.broken is None
        control.agree(Agreement(4, 2, 3, b"\0"))
        return texts
    finally:
        control.close()


@pytest.mark.matrix
@pytest.mark.oldest
def test_all_ranks_learn_of_a_difference(pools: Pools) -> None:
    first, second = pools(2).run(differ)
    assert first == second
    assert "Rank 0 issued 2 " in first[0] and "rank 1 issued 3 " in first[0]
    assert "rank 0 at 'agreement of step 2', rank 1 at 'agreement of step 3'" in first[1]


def one_is_late(late: int, deadline: float) -> tuple[str, str, float]:
    control = Control.over(None, deadline_seconds=deadline)
    control.agree(Agreement(1, 2, 3, b"\0"))
    begin = time.monotonic()
    try:
        if control.rank == late:
            time.sleep(2 * deadline)
        control.agree(Agreement(2, 2, 3, b"\0"))
    except (AgreementError, RankFailure) as error:
        caught = error
    assert control.broken is not None
    with pytest.raises(RankFailure, match="cannot be used again"):
        control.barrier()
    took = time.monotonic() - begin
    if control.rank == 0:
        time.sleep(max(0.0, 3 * deadline - took))  # the late rank asks why
    control.close()
    return type(caught).__name__, str(caught), took


@pytest.mark.matrix
@pytest.mark.oldest
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_a_missing_rank_is_named_at_the_deadline(pools: Pools, world: int) -> None:
    late = world - 1
    results = pools(world).run(one_is_late, late, 1.5)
    for rank, (kind, text, took) in enumerate(results):
        assert kind == "AgreementError", text
        assert f"rank {late} (last seen at 'agreement of step 1') did not arrive within the deadline of 1.5 s" in text
        assert rank == late or took < 1.5 + patient(1.0)


def one_dies(dead: int) -> str:
    control = Control.over(None, deadline_seconds=30)
    control.barrier("the first")
    if control.rank == dead:
        os._exit(3)
    try:
        control.barrier("the second")
    except (AgreementError, RankFailure) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        control.close()
    return "nothing"


@pytest.mark.matrix
@daily("dead", [0], [1])
def test_a_dead_rank_is_named_at_once(disposable: Pools, dead: int) -> None:
    outcomes = disposable(2).outcomes(one_dies, dead)
    assert outcomes[dead].exit_code == 3
    text = outcomes[1 - dead].value
    assert (
        "rank 1 (last seen at 'the first') will not arrive: the connection" in text
        if dead
        else "] rank 0 has gone" in text
    )


def over_a_part(ranks: list[int]) -> list[int] | None:
    """Two controls after each other over some of the ranks only, after the default group's own work."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    seen = []
    for _ in range(2):
        control = Control.over(group, deadline_seconds=30)
        seen.append(control.all_gather_object(dist.get_rank()))
        control.close()
    dist.destroy_process_group(group)
    assert seen[0] == seen[1]
    return seen[0]


def test_some_of_the_ranks(pools: Pools) -> None:
    assert pools(3).run(over_a_part, [1, 2]) == [None, [1, 2], [1, 2]]


def outlives_the_default_group() -> list[int]:
    """As a script that destroys the process group before the engine."""
    control = Control.over(None, deadline_seconds=30)
    dist.destroy_process_group()
    try:
        return control.all_gather_object(control.rank)
    finally:
        control.close()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_the_control_group_outlives_the_default_group(disposable: Pools) -> None:
    assert disposable(2).run(outlives_the_default_group) == [[0, 1], [0, 1]]
