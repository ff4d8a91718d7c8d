"""Gathers by name that are asked for together: one launch, or none where one of them is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zeroweave import dc
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.process_group import LocalTransport
from zeroweave.comm.transport import Pending
from zeroweave.dc.gathers import Gathers
from zeroweave.dc.registry import RegisteredParameter, Registry
from zeroweave.errors import ParameterError
from zeroweave.layout import BucketLayout
from zeroweave.runtime.flat import ShardedFlat

CPU = torch.device("cpu")


class Noting(LocalTransport):
    """Notes its gathers, and the launches that they are in."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.noted: list[str] = []

    @contextmanager
    def together(self) -> Iterator[None]:
        self.noted.append("(")
        yield
        self.noted.append(")")

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self.noted.append(str(int(shard[0])))
        return super().all_gather(flat, shard, layout)


@pytest.fixture
def runtime() -> Iterator[dc.Runtime]:
    yield dc.init()
    dc.cleanup()


def test_what_is_prefetched_together_is_one_launch(runtime: dc.Runtime) -> None:
    transport = Noting()
    registry = Registry(runtime._control, CPU, lambda layout, shard: ShardedFlat(layout, shard, transport, Gauge()))
    shards = [torch.full((4,), float(i)) for i in range(4)]
    for ds_id, shard in enumerate(shards):
        registry.register_z3_param(RegisteredParameter(ds_id, (4,), torch.zeros(4), persistent=ds_id == 3), shard)
    registry.register_graph(7, range(4), True, True)
    gathers = Gathers(registry, transport)

    with pytest.raises(ParameterError, match="not the memory that was registered"):
        gathers.prefetch_params_fused(7, [shards[0], torch.zeros(4)], [0, 1])
    assert transport.noted == [] and not gathers.held

    gathers.prefetch_params_fused(7, [*shards, shards[0]], [0, 1, 2, 3, 0])
    assert transport.noted == ["(", "0", "1", "2", "3", ")"]
    gathers.prefetch_params_fused(7, shards[:1], [0])
    for ds_id, shard in enumerate(shards):
        full = gathers.wait_allgather(gathers.allgather_param(shard, 7, ds_id), 7, ds_id)
        assert full.tolist() == [float(ds_id)] * 4
        gathers.release_param(full, 7, ds_id)
        del full
    assert transport.noted.count("0") == 1 and not gathers.held
