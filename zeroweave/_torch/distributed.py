"""Process groups."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist

# Why: a module with the default group, of the time when it is imported, as the default of arguments, which keeps it for
# good. Optimizers import it. Here it is imported before there is a group, if a program imports this package before.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed import distributed_c10d as c10d

_Group: Any = dist.ProcessGroup
# The second is the name before 2.13.
_all_gathers = getattr(_Group, "all_gather_single_coalesced", None) or _Group.allgather_into_tensor_coalesced


def new_process_group(
    ranks: Sequence[int],
    backend: str,
    store: Any,
    name: str,
    timeout: datetime.timedelta,
) -> torch.distributed.ProcessGroup:
    """A registered process group of these ranks of the default one, in this order, that meets in `store`.

    Why: `new_group` names groups by their ranks and by how many groups a process has, so that one of ranks that
    had another before finds the addresses of that one in the store, and ranks with other groups never meet.
    """
    default = torch.distributed.group.WORLD
    device = default.bound_device_id if default is not None else None
    rank = list(ranks).index(torch.distributed.get_rank())
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        rank,
        list(ranks),
        c10d.Backend(backend),
        store,
        c10d.GroupName(name),
        timeout=timeout,
        device_id=device,
    )
    c10d._world.pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
    return cast(torch.distributed.ProcessGroup, group)


def end_process_group(group: dist.ProcessGroup) -> None:
    """Destroys a registered process group, unless the program has destroyed all of them.

    Why: only the registry knows whether that has happened.
    """
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """That of the collectives that `group` begins from now on. Why: nothing public changes it."""
    c10d._set_pg_timeout(timeout, group)


def copying_communicator(store: Any, rank: int, world: int, name: str, timeout: datetime.timedelta) -> Any:
    """NCCL's communicator of `world` ranks that meet in `store`, which uses no SMs where it can do without.

    Why: one that torch knows as a process group ends with all others in `destroy_process_group()`, although memory is
    registered with it, and giving that memory back ends the process then. The timeout is private among the options.
    """
    nccl: Any = vars(dist)["ProcessGroupNCCL"]  # builds without CUDA have none
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    options.group_name, options._timeout = name, timeout
    options.global_ranks_in_group = list(range(world))
    return nccl(store, rank, world, options)


def collectives_begun() -> dict[str, int]:
    """How many collectives this process has begun in each process group that counts them, by the group's name.

    Why: nothing else tells what a program does in its own groups. May be called in any thread.
    """
    begun: dict[str, int] = {}
    for group in list(c10d._world.pg_map):
        with suppress(RuntimeError):  # not all backends count
            begun[group.group_name] = cast(Any, group)._get_sequence_number_for_group()
    return begun


def all_gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to gather each rank's `mine` in `output`, in rank order; its work. Why: the public one takes longer."""
    return group._allgather_base(output, mine, _all_gather_options())


def all_gather_together(outputs: list[torch.Tensor], mine: list[torch.Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Several of them in one launch; their work. Why: there is no public way to that."""
    return _all_gathers(group, outputs, mine, _all_gather_options())


@cache
def _all_gather_options() -> AllgatherOptions:
    """Those of every gather. Why: to make them takes longer than to ask for them again."""
    options = AllgatherOptions()
    options.asyncOp = True
    return options


def reduce_scatter(
    output: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work:
    """Starts to reduce the ranks' flats, of which `output` becomes this rank's part; its work. Why: as `all_gather`."""
    return group._reduce_scatter_base(output, flat, _reduce_scatter_options(op))


@cache
def _reduce_scatter_options(op: dist.ReduceOp.RedOpType) -> ReduceScatterOptions:
    """Those of every reduction by `op`. Why: as `_all_gather_options`."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp(op), True
    return options
