"""GPUs that read each other's memory, and code for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d


class Shared(NamedTuple):
    """Memory of this rank that the GPUs of all ranks of a group reach."""

    tensor: torch.Tensor
    """uint8 [bytes]; it owns this rank's part"""
    addresses: tuple[int, ...]
    """by rank, where this GPU finds each rank's"""
    mapping: Any
    """what keeps the others' reachable"""


def memory_for_peers(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] that other GPUs of the host can be given access to, counted as PyTorch's.

    Why: an ordinary tensor cannot be read by another process's GPU without a context on both.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    pool = torch.cuda.MemPool(_SymmetricMemory.get_mempool_allocator(device))
    with torch.cuda.use_mem_pool(pool, device):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def shared(tensor: torch.Tensor, name: str, rank: int, world: int, store: Any) -> Shared:
    """`tensor` of `memory_for_peers`, with that of each other rank. Collective; `name` is the group's, and new.

    Why: the public function asks for a registered process group, and meets in the store that it was made with, which
    nobody watches.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    name = c10d.GroupName(name)
    group = torch.distributed.ProcessGroup(store, rank, world)  # which the registry does not keep
    _register_process_group(name, group)
    try:
        mapping = _SymmetricMemory.rendezvous(tensor, name)
    finally:
        _unregister_process_group(name)
    return Shared(tensor, tuple(mapping.buffer_ptrs), mapping)


def are_linked(devices: Sequence[int]) -> bool:
    """Is there NVLink between each two of these GPUs of the host? Why: nothing public tells."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    return all(links[one][other] > 0 for one in devices for other in devices if one != other)


def compiled(source: str, name: str, options: Sequence[str]) -> Any:
    """The kernel `name` of CUDA code, for this device. Why: it is public only as a wish of the documentation.

    It is launched by `kernel(grid=, block=, args=, stream=)`. Whole numbers are `int` there.
    """
    return torch.cuda._compile_kernel(source, name, nvcc_options=list(options))
