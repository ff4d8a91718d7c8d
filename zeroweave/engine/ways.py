"""How data of one engine crosses ranks: its communicators, and what gathers and reduces by which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import torch
import torch.distributed as dist

from zeroweave._torch.distributed import all_to_all
from zeroweave.comm.choose import Asked, Choice, choose, no_room, refused
from zeroweave.comm.copy_engine import SYMMETRIC, CopyEngines
from zeroweave.comm.exchange import Exchange, Outboxes
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.places import Places
from zeroweave.comm.process_group import make_transport, own_group
from zeroweave.comm.transport import Transport
from zeroweave.config import Config
from zeroweave.layout import WORLD, BucketLayout
from zeroweave.notices import Journal
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import at_end, backstop
from zeroweave.runtime.policy import Policy

_OUTBOXES: Final = 3
"""One is written while one is sent, and one more where a backward is ahead."""


@dataclass(frozen=True)
class Links:
    """What communicators of an engine are made of, and ended by. `groups`: of sharding, by name, and how many."""

    group: dist.ProcessGroup | None
    control: Control
    device: torch.device
    ledger: Ledger
    groups: Mapping[str, int]
    ends: ExitStack

    def transports(self) -> dict[str, Transport]:
        """The transports over `group` and over the sharding groups, whose communicators are made here."""
        control = self.control
        transports = {WORLD: make_transport(self.group, self.device, self.ledger)}
        for name, count in self.groups.items():
            if (own := own_group(self.group, control, backstop(control.deadline_seconds), count)) is not None:
                self.ends.callback(dist.destroy_process_group, own)
            transports[name] = make_transport(own, self.device, self.ledger, name, divisor=control.world)
        return transports

    def keep(self, started: ExitStack) -> None:
        """It ends with the engine."""
        at_end(self.ends, started.pop_all(), lambda: self.control.broken is not None)


def gather_by(
    asked: Asked, transports: dict[str, Transport], links: Links, layouts: Sequence[BucketLayout], journal: Journal
) -> tuple[Places, Choice]:
    """Where buckets are gathered by copy engine, and why, or why none is; puts copy engines around `transports`.

    Collective. The communicators are made here.
    """
    control, device = links.control, links.device
    largest = max((b.nbytes for b in layouts), default=0)
    if why := refused(asked, control, device, largest):
        return Places(), Choice(why)
    engines = CopyEngines(control, device)
    places = Places(
        engines.make,
        links.ledger.gauge(SYMMETRIC),
        lambda nbytes: journal.warn("fallback", no_room(nbytes, engines.why_not)),
    )
    with ExitStack() as started:
        started.callback(engines.close)
        started.callback(places.close)
        timeout = backstop(control.deadline_seconds)
        joined = {WORLD: engines.join(timeout)}
        joined |= {name: engines.join(timeout, count) for name, count in links.groups.items()}
        plain = links.group or dist.group.WORLD
        assert plain is not None  # there are several ranks
        choice = choose(asked, control, device, engines, plain, joined[WORLD], largest)
        if choice.least is None:
            return Places(), choice
        links.keep(started)
    for name, own in joined.items():
        if own is not None:
            transports[name] = engines.around(transports[name], own, links.ledger, name)
    return places, choice


def reduce_by(
    settings: Config,
    transports: dict[str, Transport],
    links: Links,
    layouts: Sequence[BucketLayout],
    policy: Policy,
    journal: Journal,
) -> str:
    """How gradients are reduced, and why. By copy engine, an exchange is put around the transport of all ranks.

    Collective. The communicator is made here, and all memory of the exchange.
    """
    reduced = [b for b in layouts if b.trainable and b.group == WORLD]
    flats = {b.id: b.numel * _reduced_in(b, settings, policy).itemsize for b in reduced}
    if not flats:
        return "by kernel: nothing is reduced over all ranks"
    nbytes = piece_bytes(list(flats.values()))
    if why := refused(settings.transport.reductions, links.control, links.device, nbytes, "reductions"):
        return f"by kernel: {why}"
    written = settings.compile.enabled and all(flats[b.id] == b.nbytes for b in reduced)
    engines = CopyEngines(links.control, links.device, "reductions")
    pieces: list[torch.Tensor] = []
    with ExitStack() as started:
        started.callback(engines.close)
        own = engines.join(backstop(links.control.deadline_seconds))
        for _ in range(2 + (_OUTBOXES if written else 0)):
            if (memory := engines.make(nbytes)) is None:
                text = f"{nbytes / (1 << 20):g} MiB to reduce in could not be had ({engines.why_not})"
                journal.warn("fallback", f"transport.reductions: {text}: gradients are reduced by kernel, but slower")
                pieces.clear()
                return f"by kernel: {text}"
            started.callback(memory.close)
            pieces.append(memory.tensor())
        gauge, taken = links.ledger.gauge(SYMMETRIC), sum(piece.nbytes for piece in pieces)
        gauge.add(taken)
        started.callback(gauge.add, -taken)
        inbox, copies, *rest = pieces
        outboxes = Outboxes(rest, only_captures=settings.compile.cuda_graphs)
        exchange = Exchange(transports[WORLD], partial(all_to_all, own), inbox, copies, outboxes, links.ledger)
        started.callback(exchange.close)
        links.keep(started)
    transports[WORLD] = exchange
    return f"by copy engine up to {inbox.nbytes / (1 << 20):g} MiB: transport.reductions is 'copy_engine'"


def _reduced_in(bucket: BucketLayout, settings: Config, policy: Policy) -> torch.dtype:
    """The dtype in which a bucket's gradients travel, but for backwards that the program does not reduce."""
    own: torch.dtype = getattr(torch, bucket.dtype)
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    adds_up = settings.stage == 1 and settings.gradient_accumulation_steps > 1
    return torch.promote_types(own, policy.accumulate_dtype) if adds_up else own


def piece_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the largest flat that is exchanged, of flats of these sizes: of twice the size of most bytes, at most.

    Memory for an embedding of three times a block would stay unused for all of the blocks.
    """
    most, sizes = sum(sizes) / 2, sorted(sizes)
    middle = next(size for size, seen in zip(sizes, accumulate(sizes), strict=True) if seen >= most)
    return max(size for size in sizes if size <= 2 * middle)
