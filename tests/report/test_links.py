"""What the doctor says of links between ranks, and what the ranks tell it."""

from __future__ import annotations

import os

import pytest

from zeroweave.report.doctor import links
from zeroweave.report.launch import answer_of
from zeroweave.report.links import FLOORS, Links, measured

PAIRS = ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]


def of(device: str, hosts: str, **rates: float) -> Links:
    """All pairs of four ranks at 100 GB/s, but for those that are named, as `p01`."""
    slow = {f"{name[1]}-{name[2]}": rate for name, rate in rates.items()}
    return Links(device, tuple(hosts), dict.fromkeys(PAIRS, 100.0) | slow)


@pytest.mark.parametrize(("device", "hosts"), [("cuda", "aaaa"), ("cpu", "aaaa"), ("cuda", "aabb")])
def test_links_that_are_alike(device: str, hosts: str) -> None:
    (check,) = links(of(device, hosts))
    assert (check.state, check.detail) == ("ok", "4 ranks exchange 100.0 to 100.0 GB/s, each with each")
    assert "50.0 to 100.0 GB/s" in next(links(of(device, hosts, p23=50.0))).detail


@pytest.mark.parametrize(
    ("device", "hosts", "says", "cure"),
    [
        ("cuda", "aaaa", "ranks 1 on a and 2 on a exchange 30.00 GB/s, others of", "set CUDA_VISIBLE_DEVICES"),
        ("cpu", "aaaa", "ranks 1 on a and 2 on a exchange 30.00 GB/s", "export GLOO_SOCKET_IFNAME=lo"),
        ("cuda", "aabb", "ranks 1 on a and 2 on b exchange 30.00 GB/s", "export NCCL_SOCKET_IFNAME=<the fastest"),
        ("cpu", "aabb", "ranks 1 on a and 2 on b exchange 30.00 GB/s", "export GLOO_SOCKET_IFNAME=<the fastest"),
    ],
)
def test_a_link_that_is_slower_than_the_others(device: str, hosts: str, says: str, cure: str) -> None:
    (check,) = links(of(device, hosts, p12=30.0))
    assert (check.name, check.state) == ("link 1-2", "slow")
    assert check.detail.startswith(says) and check.cure.startswith(cure)


def test_links_between_machines_are_compared_with_each_other() -> None:
    across = dict.fromkeys(("p02", "p03", "p12", "p13"), 5.0)
    (check,) = links(of("cuda", "aabb", **across))
    assert check.state == "ok"


@pytest.mark.parametrize(("device", "inside"), FLOORS)
def test_links_that_are_all_slow(device: str, inside: bool) -> None:
    for factor, state in ((0.9, "slow"), (1.1, "ok")):
        two = Links(device, ("a", "a" if inside else "b"), {"0-1": factor * FLOORS[device, inside]})
        assert [check.state for check in links(two)] == [state]


def test_what_ranks_print_is_found() -> None:
    assert answer_of("links: ", 'a warning\nlinks: {"0-1": 3.25}\nok       links: fine\n', "") == {"0-1": 3.25}
    with pytest.raises(RuntimeError, match=r"^the ranks told nothing$"):
        answer_of("links: ", "", "")
    with pytest.raises(RuntimeError, match="ValueError: no GPU"):
        answer_of("links: ", "", "Traceback\n  ValueError: no GPU\nclosing")


@pytest.mark.matrix
def test_ranks_of_this_machine_are_measured() -> None:
    seen = measured(3)
    assert [*seen.rates] == ["0-1", "0-2", "1-2"] and all(rate > 0 for rate in seen.rates.values())
    assert len(set(seen.hosts)) == 1 and "LOCAL_RANK" not in os.environ
