"""Which device a rank computes on: that of its process group's backends, and which of several GPUs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from zeroweave.comm.process_group import device_of
from zeroweave.engine import assembly


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, rank: int | None) -> list[Any]:
    """A CPU stands in for `count` GPUs; returns what `set_device` is given."""
    became: list[Any] = []
    doubles = {"is_available": lambda: True, "device_count": lambda: count, "current_device": lambda: count - 1}
    for name, double in {**doubles, "set_device": became.append}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
    return became


@pytest.mark.parametrize(("count", "rank", "index"), [(4, 2, 2), (4, None, 3), (1, 2, 0), (1, None, 0)])
def test_a_process_that_sees_one_gpu_takes_that(
    monkeypatch: pytest.MonkeyPatch, count: int, rank: int | None, index: int
) -> None:
    with_gpus(monkeypatch, count, rank)
    assert device_of(None) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("backends", "kind"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_the_backends_of_a_group_decide(monkeypatch: pytest.MonkeyPatch, backends: str, kind: str) -> None:
    with_gpus(monkeypatch, 1, None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")  # as where a program names none
    assert device_of(cast(dist.ProcessGroup, object())).type == kind


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo,cuda:gloo"])
def test_a_group_without_nccl_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with_gpus(monkeypatch, 1, None)
        assert device_of(dist.group.WORLD) == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_ranks_have_their_device_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    module, became = nn.Linear(2, 2), with_gpus(monkeypatch, 4, 2)

    def over(*_: Any) -> Any:
        assert became == [torch.device("cuda", 2)]
        raise KeyError("met")

    monkeypatch.setattr(assembly.Control, "over", over)
    with pytest.raises(KeyError, match="met"):
        zw.initialize(module, None, {})
