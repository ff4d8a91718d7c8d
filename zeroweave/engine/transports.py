"""How data of one engine crosses ranks: its communicators, and what gathers by which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroweave._torch.distributed import end_process_group
from zeroweave.comm.copy_engine import Asked, Choice, CopyEngines, choose, no_room, refused
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import make_transport, own_group
from zeroweave.comm.registered_buffers import RegisteredBuffers
from zeroweave.comm.transport import Transport
from zeroweave.layout import ACROSS, INSIDE, WORLD, BucketLayout
from zeroweave.notices import Journal
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import at_end, backstop, groups_at_end


@dataclass(frozen=True)
class Communicators:
    """What communicators of an engine are made of, and ended by.

    `groups`: of sharding, by name, and how many. `replicas`: of buckets that all ranks share.
    """

    group: dist.ProcessGroup | None
    control: Control
    device: torch.device
    ledger: Ledger
    groups: Mapping[str, int]
    ends: ExitStack
    replicas: int = 1

    def transports(self) -> dict[str, Transport]:
        """The transports over `group` and over the sharding groups, whose communicators are made here.

        They release all groups with the engine's end, and those that are made here end then; see `groups_at_end`.
        """
        control, own_ends = self.control, ExitStack()
        groups_at_end(self.ends, own_ends, self.device, lambda: control.broken is not None)
        made = {WORLD: make_transport(self.group, self.device, self.ledger)}
        kinds = [(name, count, False, control.world) for name, count in self.groups.items()]
        if self.replicas > 1:  # what is added up inside is divided there
            size = control.world // self.replicas
            kinds += [(INSIDE, self.replicas, True, control.world), (ACROSS, size, False, 1)]
        for name, count, consecutive, divisor in kinds:
            timeout = backstop(control.deadline_seconds)
            if (own := own_group(self.group, control, timeout, count, consecutive)) is not None:
                own_ends.callback(end_process_group, own)
            made[name] = make_transport(own, self.device, self.ledger, name, divisor)
        for transport in made.values():
            own_ends.callback(transport.close)
        return dict(made)


def gather_by(
    asked: Asked,
    transports: dict[str, Transport],
    communicators: Communicators,
    layouts: Sequence[BucketLayout],
    journal: Journal,
) -> tuple[RegisteredBuffers, Choice]:
    """Where buckets are gathered by copy engine, and why, or why none is; puts copy engines around `transports`.

    Collective. The communicators are made here.
    """
    control, device = communicators.control, communicators.device
    largest = max((b.nbytes for b in layouts), default=0)
    if why := refused(asked, control, device, largest, communicators.replicas):
        return RegisteredBuffers(), Choice(why)
    engines = CopyEngines(control, device)
    registered = RegisteredBuffers(
        engines.make,
        communicators.ledger.gauge("symmetric memory"),
        lambda nbytes: journal.warn("fallback", no_room(nbytes, engines.why_not)),
    )
    with ExitStack() as started:
        started.callback(engines.close)
        started.callback(registered.close)
        timeout = backstop(control.deadline_seconds)
        joined = {WORLD: engines.join(timeout)}
        joined |= {name: engines.join(timeout, count) for name, count in communicators.groups.items()}
        choice = choose(asked, engines)
        if choice.least is None:
            return RegisteredBuffers(), choice
        at_end(communicators.ends, started.pop_all(), lambda: control.broken is not None)
    for name, own in joined.items():
        if own is not None:
            transports[name] = engines.around(transports[name], own, communicators.ledger, name)
    return registered, choice
