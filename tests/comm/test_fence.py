"""The debug switches that make collectives wait."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tests.comm.recording import RecordingTransport, layout
from zeroweave.comm.transport import Messages, Pending, Transport
from zeroweave.comm.wrappers import Fenced, fenced
from zeroweave.config import Config, RuntimeConfig
from zeroweave.config.sections import DebugConfig

CPU = torch.device("cpu")
LAYOUT = layout(world=2, numel=6)
PARTS = {0: torch.ones(6)}
KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
SYNC = ["sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather"]


def issue(transport: Transport) -> list[Pending]:
    return [
        transport.all_gather(torch.empty(6), torch.ones(3), LAYOUT),
        transport.reduce_scatter(torch.empty(3), PARTS, LAYOUT, "average"),
        transport.all_reduce(torch.empty(6), PARTS, LAYOUT, "average"),
        transport.all_to_all(*torch.zeros(2, 3, dtype=torch.uint8), Messages(0, 6, [1, 2], [2, 1])),
    ]


@pytest.mark.parametrize("switches", [DebugConfig(), DebugConfig(check_every_step=True), RuntimeConfig()])
def test_without_a_switch_there_is_no_fence(switches: DebugConfig) -> None:
    inner = RecordingTransport(0, 2)
    assert fenced(inner, CPU, switches) is inner


@pytest.mark.parametrize("switch", SYNC)
@pytest.mark.parametrize("kind", [DebugConfig, RuntimeConfig])
def test_each_switch_makes_a_fence(switch: str, kind: type[DebugConfig]) -> None:
    assert isinstance(fenced(RecordingTransport(0, 2), CPU, kind(**{switch: True})), Fenced)


@pytest.mark.parametrize(
    ("switch", "waited"),
    [
        ("sync_after_allgather", ["all_gather"]),
        ("sync_after_reduce", ["reduce_scatter", "all_reduce", "all_to_all"]),
        ("sync_before_allgather", []),  # a CPU has nothing under way
        ("sync_before_reduce", []),
    ],
)
def test_after_a_collective_it_is_waited_for_at_once_and_only_once(switch: str, waited: list[str]) -> None:
    inner = RecordingTransport(0, 2)
    pendings = issue(fenced(inner, CPU, DebugConfig(**{switch: True})))
    expected = []
    for kind in KINDS:
        expected += [(kind, "issue"), *([(kind, "wait")] if kind in waited else [])]
    assert inner.calls == expected
    for pending in pendings:
        pending.wait()
    assert sorted(call for call in inner.calls if call[1] == "wait") == sorted((kind, "wait") for kind in KINDS)
    if waited:
        with pytest.raises(RuntimeError, match="twice"):
            pendings[0 if "all_gather" in waited else 1].wait()


@pytest.mark.parametrize("switch", SYNC)
def test_what_waits_at_once_is_issued_alone(switch: str) -> None:
    class Launching(RecordingTransport):
        launches = 0

        def together(self) -> AbstractContextManager[None]:
            self.launches += 1
            return nullcontext()

    inner = Launching(0, 2)
    with fenced(inner, CPU, DebugConfig(**{switch: True})).together():
        pass
    assert inner.launches == (not switch.startswith("sync_after"))


def test_the_rest_is_handed_on() -> None:
    inner = RecordingTransport(1, 2)
    transport = fenced(inner, CPU, DebugConfig(**dict.fromkeys(SYNC, True)))
    assert (transport.rank, transport.world, transport.empty(5, torch.float32).numel()) == (1, 2, 5)
    transport.broadcast(torch.ones(1))
    transport.all_reduce_sum(torch.ones(1))
    assert inner.calls == [("broadcast", "issue"), ("all_reduce_sum", "issue")]


def test_the_engine_takes_the_switches_from_its_debug_section() -> None:
    assert Config.load({"debug": {"sync_after_reduce": True}}).debug.sync_after_reduce
