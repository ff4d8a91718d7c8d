"""Which gathers copy engines run, and why they run none."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.harness import Pools
from zeroweave.comm.copy_engine import LEAST, Asked, Choice, choose, refused, why_not
from zeroweave.errors import ConfigError
from zeroweave.ranks.control import Control

CPU = torch.device("cpu")
MIB = 1 << 20


def test_it_says_what_was_chosen_and_why() -> None:
    assert str(Choice("it is faster", LEAST)) == "by copy engine from 1 MiB on: it is faster"
    assert str(Choice("it is asked for", 1)) == "by copy engine: it is asked for"
    assert str(Choice("ranks compute on cpu")) == "by kernel: ranks compute on cpu"


class Engines:
    """Copy engines on paper."""

    def __init__(self, why_not: str = "") -> None:
        self.why_not, self.open = why_not, 0

    def make(self, nbytes: int) -> Engines | None:
        self.open += not self.why_not
        return None if self.why_not else self

    def close(self) -> None:
        self.open -= 1


def test_copy_engines_gather_from_a_size_on_or_all_or_nothing() -> None:
    engines: Any = Engines()
    assert choose("auto", engines).least == LEAST and engines.open == 0
    assert choose("copy_engine", engines).least == 1
    none: Any = Engines("no memory pool")
    assert choose("auto", none) == Choice("memory cannot be registered (no memory pool)")


def test_where_nothing_is_gathered_between_gpus_kernels_do() -> None:
    alone = Control()
    assert refused("kernel", alone, CPU, MIB) == "transport.gathers is 'kernel'"
    for asked in ("auto", "copy_engine"):
        assert refused(asked, alone, CPU, MIB) == "nothing is gathered in a world of 1"


def between_ranks(asked: Asked, device: torch.device = CPU, replicas: int = 1) -> str:
    control = Control.over(None)
    try:
        return refused(asked, control, device, MIB, replicas)
    except ConfigError as error:
        return str(error)
    finally:
        control.close()


def test_what_is_asked_for_and_cannot_be_is_an_error(pools: Pools) -> None:
    assert pools(2).run(between_ranks, "auto") == ["ranks compute on cpu"] * 2
    told = "[ZW107] transport.gathers is 'copy_engine': ranks compute on cpu. Set it to 'auto' or 'kernel'"
    assert pools(2).run(between_ranks, "copy_engine") == [told] * 2
    why = "the ranks of a group of sharding.group_size gather by kernel"
    assert pools(2).run(between_ranks, "auto", torch.device("cuda"), 2) == [why] * 2
    assert all(why in each for each in pools(2).run(between_ranks, "copy_engine", torch.device("cuda"), 2))


def test_the_first_rank_that_copies_do_not_reach_is_told() -> None:
    def why(*gpus: tuple[str, str]) -> str:
        return why_not([(host, (2, 28, 9), gpu) for host, gpu in gpus])

    assert why(("one", "a"), ("one", "b")) == ""
    assert (
        why(("one", "a"), ("two", "b"), ("one", "a")) == "rank 1 is on two, rank 0 on one: it works inside one machine"
    )
    assert why(("one", "a"), ("one", "c"), ("one", "a")) == "ranks 0 and 2 share a GPU"
    assert why_not([("one", (2, 28), "a"), ("one", (2, 27, 3), "b")]) == "NCCL 2.27.3 on rank 1: it needs 2.28"
