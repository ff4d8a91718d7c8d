"""Gathers by name that are asked for together: one launch, or none where one of them is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.dc.test_sharded_parameters import is_held
from zeroweave import dc
from zeroweave.comm.transport import Pending, Transport
from zeroweave.comm.wrappers import Around
from zeroweave.errors import ParameterError
from zeroweave.layout import BucketLayout


class Noting(Around):
    """Notes its gathers, and the launches that they are in."""

    def __init__(self, inner: Transport, noted: list[str]) -> None:
        super().__init__(inner)
        self.noted = noted

    @contextmanager
    def together(self) -> Iterator[None]:
        self.noted.append("(")
        yield
        self.noted.append(")")

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self.noted.append(str(int(shard[0])))
        return super().all_gather(flat, shard, layout)


def test_what_is_prefetched_together_is_one_launch() -> None:
    runtime = dc.init()
    noted: list[str] = []
    runtime.transport.wrap(lambda inner: Noting(inner, noted))
    shards = [torch.full((4,), float(i)) for i in range(4)]
    for ds_id, shard in enumerate(shards):
        dc.register_z3_param(ds_id, [4], shard, persistent=ds_id == 3)
    dc.register_graph_z3(7, range(4))

    with pytest.raises(ParameterError, match="not the memory that was registered"):
        dc.prefetch_params_fused(7, [shards[0], torch.zeros(4)], [0, 1])
    assert noted == [] and not is_held(runtime)

    dc.prefetch_params_fused(7, [*shards, shards[0]], [0, 1, 2, 3, 0])
    assert noted == ["(", "0", "1", "2", "3", ")"]
    dc.prefetch_params_fused(7, shards[:1], [0])
    for ds_id, shard in enumerate(shards):
        full = dc.wait_allgather(dc.allgather_param(shard, 7, ds_id), 7, ds_id)
        assert full.tolist() == [float(ds_id)] * 4
        dc.release_param(full, 7, ds_id)
        del full
    assert noted.count("0") == 1 and not is_held(runtime)
    dc.cleanup()
