"""Which parameters had gradients, where a bucket is another one's on every second rank."""

from __future__ import annotations

import torch

from tests.comm.recording import RecordingTransport
from zeroweave.comm.ledger import Gauge
from zeroweave.layout import ParameterSpec, build_layout
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.shard import Shard
from zeroweave.runtime.transfers import Transfers

SPECS = [
    ParameterSpec("dense", (4,), "float32", 4, True, None),
    ParameterSpec("experts.0", (4,), "float32", 4, True, "block", "experts"),
    ParameterSpec("experts.1", (4,), "float32", 4, True, "block", "experts"),
]


def gradients(rank: int, had: dict[int, int]) -> Gradients:
    """Those of one of four ranks, in two groups; `had`: bucket id -> a slot with a gradient."""
    transport = RecordingTransport(rank, world=4)
    layouts = build_layout(SPECS, 4, 1 << 20, groups={"experts": 2})
    device = torch.device("cpu")
    homes = [Shard(layout, torch.float32, transport, Transfers(device)) for layout in layouts]
    buckets = [
        Bucket(layout, torch.float32, transport, Gauge(), home, device)
        for layout, home in zip(layouts, homes, strict=True)
    ]
    result = Gradients(
        buckets,
        transport,
        op="average",
        reduce_dtype=None,
        accumulate_dtype=torch.float32,
    )
    for bucket, slot in had.items():
        result.deliver((), [(bucket, slot, torch.ones(4))])
    return result


def test_ranks_of_one_group_share_what_they_had() -> None:
    ranks = [gradients(0, {0: 0, 1: 0}), gradients(1, {}), gradients(2, {1: 1}), gradients(3, {1: 1})]
    flags = [each.had_gradient() for each in ranks]
    assert {len(each) for each in flags} == {1 + 2 * 2}
    some = bytes(any(each) for each in zip(*flags, strict=True))
    assert [each.absent(some) for each in ranks] == [
        {0: frozenset(), 1: frozenset()},  # ranks 0 and 2 have both experts' gradients between them
        {0: frozenset(), 1: frozenset({0})},
        {0: frozenset(), 1: frozenset()},
        {0: frozenset(), 1: frozenset({0})},
    ]


def test_a_read_without_a_gradient_is_waited_for_where_gradients_are_reduced_only() -> None:
    """Else what is complete would take memory until the backward ends."""
    for reducing in (True, False):
        account = gradients(0, {})
        account.announce([(0, 0)])
        account.read(0, 0)
        came = account.deliver([(0, 0)], [(0, 0, torch.ones(4))], reducing=reducing)
        assert came == ([] if reducing else [0])
        if not reducing:
            account.fold(came)
        assert account.deliver_eager(0, 0, torch.ones(4), reducing) == [0]
        if not reducing:
            account.fold([0])
            local = account.accounts[0].local
            assert local is not None and local[:4].tolist() == [2.0] * 4
