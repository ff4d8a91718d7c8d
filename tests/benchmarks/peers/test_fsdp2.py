"""FSDP2's gathers into two buffers that take turns, and what its names need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.models import SHAPES, batches
from benchmarks.peers.common import Options
from benchmarks.peers.fsdp2 import FixedGather, build, mesh_of, shard, unsharded_elements
from benchmarks.peers.subject import Subject
from tests.support.harness import Pool

CPU = torch.device("cpu")


class Watched(DefaultAllGather):
    """Notes at each gather whether the memory of the previous one, and of the one before it, is still in use."""

    def __init__(self) -> None:
        self.elements: list[int] = []
        self.given: list[StorageWeakRef] = []
        self.in_use: list[tuple[bool, bool]] = []

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if len(self.given) > 1:
            self.in_use.append((not self.given[-1].expired(), not self.given[-2].expired()))
        self.elements.append(math.prod(size))
        memory = super().allocate(size, dtype=dtype, device=device)
        self.given.append(StorageWeakRef(memory.untyped_storage()))
        return memory


def watched(reshard: bool) -> tuple[list[int], list[int], list[tuple[bool, bool]]]:
    """The elements that gathers are to have, those of the gathers of two steps, and what these have noted."""
    subject = Subject(SHAPES["tiny"])
    model = subject.on_meta(torch.float32)
    parts = subject.parts(model)
    expected = [unsharded_elements(group, 2) for group in parts.groups()]
    shard(model, parts, mesh_of(CPU, 0), reshard)
    gather = Watched()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
    subject.materialize(model, CPU)
    data = batches(SHAPES["tiny"], 2, 32, dist.get_rank(), CPU)
    for _ in range(2):
        torch.autograd.backward(subject.loss(model(**subject.batch(next(data)))))
    return expected, gather.elements, gather.in_use


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 7), (False, 4)])
def test_fsdp2_gives_memory_up_before_the_gather_after_the_next(
    pools: Callable[[int], Pool], reshard: bool, gathers: int
) -> None:
    """Two buffers are enough by that, and one is not."""
    for expected, elements, in_use in pools(2).run(watched, reshard):
        assert len(elements) == 2 * gathers, "embedding, two layers and tail; all but the tail again in the backward"
        assert elements[:4] == expected
        assert not any(before for _, before in in_use)
        assert any(previous for previous, _ in in_use)


def test_a_gather_must_fit() -> None:
    gather = FixedGather([torch.empty(64, dtype=torch.uint8) for _ in range(2)])
    first, second, third = (gather.allocate((size,), dtype=torch.bfloat16, device=CPU) for size in (32, 16, 8))
    assert first.shape == (32,) and third.data_ptr() == first.data_ptr() != second.data_ptr()
    with pytest.raises(ValueError, match="a gather of 66 bytes does not fit into a buffer of 64"):
        gather.allocate((33,), dtype=torch.bfloat16, device=CPU)


def test_a_buffer_has_room_for_padding() -> None:
    parameters = [torch.empty(5, 3), torch.empty(7)]
    assert [unsharded_elements(parameters, ranks) for ranks in (1, 2)] == [22, 26]


def test_a_mask_that_a_capture_changes_is_refused() -> None:
    with pytest.raises(ValueError, match="transformers makes another mask while a CUDA graph is captured"):
        build(True, ("graphs",), SHAPES["tiny"], CPU, Options(hf="masked"))
