"""What the names of implementations say, and what follows from them."""

from __future__ import annotations

import pytest

from benchmarks.peers import Name, environment, parse, peers_of


def test_a_name_has_a_family_variants_and_a_stage() -> None:
    assert parse("zeroweave-z1") == Name("zeroweave", 1)
    assert parse("zeroweave-graphs-kernel-z3", {"kernel": {}}) == Name("zeroweave", 3, ("graphs", "kernel"))
    assert parse("fsdp2-z2") == Name("fsdp2", 2)
    assert parse("fsdp2-ce-rs-z3") == Name("fsdp2", 3, ("ce", "rs"))
    assert parse("fsdp2-ce-graphs-z2") == Name("fsdp2", 2, ("ce", "graphs"))
    assert parse("fsdp2-graphs-z3") == Name("fsdp2", 3, ("graphs",))
    assert parse("compute-graphs") == Name("compute", 0, ("graphs",))


@pytest.mark.parametrize(
    "name", ["zeroweave", "zeroweave-kernel-z3", "fsdp2-z1", "fsdp2-rs-z3", "fsdp2-graphs-ce-z3", "compute-z3", ""]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {name}; there are zeroweave"):
        parse(name)


def test_only_copy_engines_need_a_variable() -> None:
    for name in ("fsdp2-ce-z3", "fsdp2-ce-rs-z2", "fsdp2-ce-graphs-z3"):
        assert environment(name) == {"NCCL_CTA_POLICY": "2"}
    assert (
        not environment("fsdp2-z3")
        and not environment("fsdp2-graphs-z3")
        and not environment("zeroweave-z3")
        and not environment("compute")
    )


def test_peers_are_of_the_same_stage() -> None:
    settings = ("ce-graphs-", "graphs-", "ce-rs-", "ce-", "")
    assert set(peers_of("zeroweave-graphs-z3")) == {f"fsdp2-{setting}z3" for setting in settings}
    assert peers_of("zeroweave-z1") == peers_of("zeroweave-z2")
    assert set(peers_of("zeroweave-z2")) == {f"fsdp2-{setting}z2" for setting in settings}
    for name in peers_of("zeroweave-z3"):
        assert parse(name).family == "fsdp2"
    assert peers_of("fsdp2-ce-z3") == ()
