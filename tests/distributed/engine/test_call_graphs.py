"""Graphs of calls on several ranks: exact, and launched where parameters stay at their addresses."""

from __future__ import annotations

from unittest.mock import patch

import torch.distributed as dist

from tests.engine.test_call_graphs import engine_of, same_parameters, train
from tests.support.graph_double import GraphDouble
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave.comm.registered_buffers import RegisteredBuffers


def trains(stage: int, gas: int, lengths: tuple[int, ...]) -> tuple[bool, bool, int]:
    plain = engine_of(False, stage, gas)
    wanted = train(plain, 12, lengths)
    assembly = "zeroweave.engine.assembly"
    with (
        patch(f"{assembly}.capture_for", lambda device: GraphDouble(1 << 24)),
        patch(f"{assembly}.fixed_buffers", lambda device, gauge: RegisteredBuffers()),  # those are of a CUDA device
    ):
        engine = engine_of(True, stage, gas)
    got = train(engine, 12, lengths)
    same = same_parameters(engine, plain)
    graphed = engine.stats.graphed_calls
    engine.destroy()
    plain.destroy()
    dist.barrier()
    return got == wanted, same, graphed


@daily(
    ("stage", "gas", "lengths"),
    [(2, 1, (6,))],
    [(stage, gas, (6, 4)) for stage in (1, 2, 3) for gas in (1, 2)],
)
def test_trains_as_without_graphs(pools: Pools, stage: int, gas: int, lengths: tuple[int, ...]) -> None:
    for losses, parameters, graphed in pools(2).run(trains, stage, gas, lengths):
        assert losses and parameters
        assert graphed > 20 or stage == 3  # there, gathered parameters have no fixed addresses without places
