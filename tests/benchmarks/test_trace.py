"""What a trace says of the GPU's time, on events made by hand (microseconds)."""

from __future__ import annotations

import pytest

from benchmarks import trace
from benchmarks.trace import Work

COMPUTE, COMMUNICATION, COPIES = 7, 20, 30


def test_union_joins_what_overlaps_or_touches() -> None:
    assert trace.union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]


def test_overlap_is_the_time_inside() -> None:
    assert trace.overlap([(0, 4), (6, 9)], (3, 7)) == 2


def test_a_step_with_a_hidden_and_an_exposed_collective() -> None:
    work = [
        Work("ncclDevKernel_AllGather", COMMUNICATION, 0, 100),  # exposed: nothing to compute yet
        Work("matmul", COMPUTE, 100, 300),
        Work("ncclDevKernel_AllGather", COMMUNICATION, 150, 250),  # hidden
        Work("copy", COPIES, 160, 180),
        Work("add", COMPUTE, 310, 350),
        Work("ncclDevKernel_ReduceScatter", COMMUNICATION, 320, 400),  # hidden for 30, exposed for 50
    ]
    found = trace.analyse(work, host_ms=0.2)
    assert found is not None
    assert found.kernels == 6 and found.host == 0.2
    assert found.span == pytest.approx(0.400)
    assert found.compute_busy == pytest.approx(0.240)
    assert found.compute_idle == pytest.approx(0.160)
    assert found.communication == pytest.approx(0.280)
    assert found.exposed == pytest.approx(0.150)
    assert found.other_busy == pytest.approx(0.020)
    assert found.collectives["ncclDevKernel_AllGather"] == (2, pytest.approx(0.200))
    assert [(g.us, g.before, g.after) for g in found.gaps] == [
        (100, "start", "matmul"),
        (50, "add", "end"),
        (10, "matmul", "add"),
    ]
    assert "matmul" in found.text()


def test_a_graph_spreads_the_computation_over_streams() -> None:
    work = [
        Work("Memcpy PtoP (Device -> Device)", COPIES, 0, 100),  # exposed, but no kernel
        Work("matmul", 1, 100, 300),
        Work("Memcpy PtoP (Device -> Device)", COPIES, 150, 340),
        Work("add", 2, 310, 350),
        Work("matmul", 3, 350, 450),
        Work("ncclDevKernel_ReduceScatter", COMMUNICATION, 360, 500),
    ]
    found = trace.analyse(work)
    assert found is not None
    assert found.compute_busy == pytest.approx(0.340)
    assert found.other_busy == pytest.approx(0.290)
    assert found.exposed == pytest.approx(0.050)
    assert [(g.us, g.before, g.after) for g in found.gaps] == [
        (100, "start", "matmul"),
        (50, "matmul", "end"),
        (10, "matmul", "add"),
    ]


def test_no_work_says_nothing() -> None:
    assert trace.analyse([]) is None
