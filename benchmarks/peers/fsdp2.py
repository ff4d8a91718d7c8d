"""FSDP2 by the strongest recipe known, with gathers by NCCL's kernels or by copy engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.models import Shape
from benchmarks.peers.common import Options, Trainer, adamw, compile_in_place, mean
from benchmarks.peers.subject import Subject

COPY_ENGINE_VARIABLES: Mapping[str, str] = {"NCCL_CTA_POLICY": "2"}
"""NCCL's zero-CTA policy for all communicators of the process: it gathers by copy engines where buffers allow it."""


def build(reshard: bool, variants: Sequence[str], shape: Shape, device: torch.device, options: Options) -> Trainer:
    """Embedding, blocks and tail are sharded apart, blocks and tail compiled.

    The tail is used again at once, so it is never resharded after the forward. Gradients of micro-steps add up
    unsharded and are reduced once. Where parameters stay gathered after the forward, they stay until the last
    micro-step's backward is over.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    subject = Subject(shape, options.hf)
    model = subject.on_meta(torch.float32)
    parts = subject.parts(model)
    compile_in_place([*([parts.embedding] if options.compile_embedding else []), *parts.compiled], options)

    def shard(module: nn.Module | list[nn.Module], reshard: bool = reshard) -> None:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)

    shard(parts.embedding)
    for layer in parts.layers:
        shard(layer)
    shard(parts.tail, reshard=False)
    shard(model)
    note = copy_engines(model, mesh.get_group(), "rs" in variants) if "ce" in variants else None
    subject.materialize(model, device)
    optimizer = adamw(model.parameters(), device)

    def micro_step(tokens: Tensor, last: bool) -> Tensor:
        if options.gas > 1:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(reshard or last)
        loss = subject.loss(model(**subject.batch(tokens)))
        torch.autograd.backward(loss if options.gas == 1 else loss / options.gas)
        return loss.detach()

    def step(batches: Sequence[Tensor]) -> Tensor:
        count = len(batches)
        loss = mean((micro_step(tokens, index == count) for index, tokens in enumerate(batches, 1)), count)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step, note=note)


def copy_engines(model: nn.Module, group: dist.ProcessGroup, reductions: bool) -> str | None:
    """Has FSDP2's gathers write to symmetric memory, where NCCL moves them by copy engines; says so if it cannot.

    With `reductions` their buffers lie in symmetric memory, too.
    """
    if group.size() == 1 or not torch.cuda.is_available():
        return "gathers are plain: copy engines need GPUs and two ranks"
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")
    dist.barrier(group)  # a rendezvous needs the communicator, which is made by its first collective
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if hasattr(module, "set_symm_mem_for_comm"):
            module.set_symm_mem_for_comm("NCCL")
        else:
            module.set_custom_all_gather(SymmetricGather())  # type: ignore[arg-type]
    # Not before all gathers are set: modules that are sharded together share what is set, and PyTorch refuses to set
    # gathers where the reduction is no longer its own.
    for module in sharded if reductions else []:
        module.set_custom_reduce_scatter(SymmetricReduceScatter())  # type: ignore[arg-type]
    return None


class SymmetricMemory:
    """Buffers out of the pool that PyTorch keeps for symmetric memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, *tensors: Tensor, group: dist.ProcessGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric

        for tensor in tensors:
            symmetric.rendezvous(tensor, group=group.group_name)


class SymmetricGather(SymmetricMemory):
    """What `set_symm_mem_for_comm` installs, for PyTorch 2.11, which does not have it.

    FSDP2 gathers in place, so that the input lies in the output's memory.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.rendezvous(output_tensor, group=group)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduceScatter(SymmetricMemory):
    """A reduction as FSDP2 asks for it, by its mean; `set_symm_mem_for_comm` has one for sums only."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.rendezvous(input_tensor, output_tensor, group=group)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
