"""GPUs that read each other's memory, and code for them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d

_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_FAILED: Final = "failed"

_FOLDERS: Final = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
_LONGEST: Final = 107
"""Bytes of a socket's path."""


class Shared(NamedTuple):
    """Memory of this rank that the GPUs of all ranks of a group reach."""

    tensor: torch.Tensor
    """uint8 [bytes]; it owns this rank's part"""
    addresses: tuple[int, ...]
    """by rank, where this GPU finds each rank's"""
    mapping: Any
    """what keeps the others' reachable"""

    def first_of(self, rank: int) -> int:
        """The first byte of that rank's part, as a kernel of this GPU reads it now."""
        return int(self.mapping.get_buffer(rank, (1,), torch.uint8).max())


def memory_for_peers(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] that other GPUs of the host can be given access to, counted as PyTorch's: zeros, there already.

    Why: an ordinary tensor cannot be read by another process's GPU without a context on both.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    pool = torch.cuda.MemPool(_SymmetricMemory.get_mempool_allocator(device))
    with torch.cuda.use_mem_pool(pool, device):
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return memory


def where_handed_over(device: torch.device) -> tuple[str, str]:
    """Names where this process hands memory over to others, and why it cannot, or "".

    Why: PyTorch sends it through sockets in a folder for temporary files, whose names have the number of their process.
    Where two processes have different folders, or number processes differently, it waits for ever, holding the
    interpreter, or takes its own memory for another's. And it does not look at the length of a path.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    kind = _SymmetricMemory.get_backend(device)
    if (kind or "CUDA").upper() != "CUDA":
        return "", f"torch.distributed._symmetric_memory has the backend {kind!r}, and it takes 'CUDA'"
    folder = next((os.environ[name] for name in _FOLDERS if name in os.environ), "/tmp")
    if len(os.fsencode(f"{folder}/symm_mem-{os.getpid()}")) > _LONGEST:
        return "", f"the path of the folder {folder!r} is too long for sockets: set TMPDIR to another one"
    try:
        found = os.stat(folder)
        return f"{found.st_dev} {found.st_ino} {os.readlink('/proc/self/ns/pid')}", ""
    except OSError as error:
        return "", f"sockets need a folder, and numbers of processes: {error}"


class _Meeting(c10d.Store):
    """A store in which ranks exchange one value after the other, each waiting for all others.

    Why: PyTorch meets in C++ while it holds the interpreter, so that no thread of this process could tell that a rank
    is missing, or hear of it. And it numbers exchanges by how many a process has had, which ranks may differ in.
    """

    def __init__(self, store: Any, rank: int, seconds: float) -> None:
        """`seconds`: how long a rank is waited for."""
        super().__init__()
        self._store, self._rank, self._seconds, self._sent = store, rank, seconds, 0

    def _key(self, key: str) -> str:
        """What that rank has for the present exchange. PyTorch's keys end with the rank."""
        return f"{self._sent}/{key.rsplit('/', 1)[-1]}"

    def set(self, key: str, value: Any) -> None:
        """An exchange begins with what this rank has."""
        self._sent += 1
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: object = None) -> None:
        end = time.monotonic() + self._seconds
        for key in map(self._key, keys):
            while not self._store.check([key]):
                if self._store.check([_FAILED]):
                    raise RuntimeError(self._store.get(_FAILED).decode())
                if time.monotonic() > end:
                    raise RuntimeError(f"rank {key.rsplit('/', 1)[-1]} has not come within {self._seconds:g} s")
                time.sleep(0.001)

    def fail(self, why: str) -> None:
        """This rank will not come any more: nobody has to wait for it."""
        self._store.set(_FAILED, f"rank {self._rank}: {why}")


def shared(
    tensors: Sequence[torch.Tensor], name: str, rank: int, world: int, store: Any, seconds: float
) -> list[Shared]:
    """Each of these, of `memory_for_peers`, with that of each other rank. Collective; `name` is the group's, and new.

    `store` is a new one, too. Each rank is waited for `seconds`, or until one has failed. Why: the public function asks
    for a registered process group, and meets in the store that it was made with. It sets up multicast, too, which
    nobody needs here, unless the environment tells it not to.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    meeting, found = _Meeting(store, rank, seconds), []
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        for number, tensor in enumerate(tensors):
            own = c10d.GroupName(f"{name} {number}")
            group = torch.distributed.ProcessGroup(meeting, rank, world)  # neither is kept by the registry
            _register_process_group(own, group)
            try:
                mapping = _SymmetricMemory.rendezvous(tensor, own)
            finally:
                _unregister_process_group(own)
            if mapping is None:
                raise RuntimeError("PyTorch's allocator has other memory than it was asked for")
            found.append(Shared(tensor, tuple(mapping.buffer_ptrs), mapping))
    except Exception as error:
        meeting.fail(str(error))
        raise
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
    return found


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
