"""FSDP2 by the strongest recipe known: gathers by NCCL's kernels or by copy engines, eagerly or as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.models import Shape
from benchmarks.peers.common import Options, Trainer, adamw, compile_in_place, mean
from benchmarks.peers.step_graph import trainer
from benchmarks.peers.subject import Parts, Subject

COPY_ENGINE_VARIABLES: Mapping[str, str] = {"NCCL_CTA_POLICY": "2"}
"""NCCL's zero-CTA policy for all communicators of the process: it gathers by copy engines where buffers allow it."""


def build(reshard: bool, variants: Sequence[str], shape: Shape, device: torch.device, options: Options) -> Trainer:
    """Embedding, blocks and tail are sharded apart, blocks and tail compiled.

    The tail is used again at once, so it is never resharded after the forward. Gradients of micro-steps add up
    unsharded and are reduced once. Where parameters stay gathered after the forward, they stay until the last
    micro-step's backward is over. With sharding groups the mesh has two dimensions (HSDP).

    With the variant `graphs` all micro-steps and the optimizer's step are one CUDA graph. FSDP2 meets no event in it
    that was recorded before the capture: a step begins and ends with all parameters resharded and no gradient.
    """
    graphed = "graphs" in variants
    if graphed and options.hf == "masked":
        raise ValueError("graphs and --hf masked: transformers makes another mask while a CUDA graph is captured")
    subject = Subject(shape, options.hf, options.lora)
    model = subject.on_meta(torch.float32)
    parts = subject.parts(model)
    largest = max(unsharded_elements(group, dist.get_world_size()) for group in parts.groups())
    compile_in_place([*([parts.embedding] if options.compile_embedding else []), *parts.compiled], options)
    mesh = mesh_of(device, options.group_size)

    shard(model, parts, mesh, reshard)
    notes = []
    if "ce" in variants:
        nbytes = largest * torch.bfloat16.itemsize
        notes = copy_engines(model, mesh.get_group("shard"), "rs" in variants, nbytes if graphed else 0, device)
    subject.materialize(model, device)
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), device, capturable=graphed)

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

    return trainer(step, graphed, device, *notes)


def shard(model: nn.Module, parts: Parts, mesh: DeviceMesh, reshard: bool) -> None:
    """Shards embedding, layers and tail apart; of a model without values, too."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (parts.embedding, *parts.layers):
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(parts.tail, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)


def mesh_of(device: torch.device, group_size: int) -> DeviceMesh:
    """The ranks in one dimension, or replicated across groups of `group_size` consecutive ones; 0: no groups."""
    world = dist.get_world_size()
    if not group_size:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // group_size, group_size), mesh_dim_names=("replicate", "shard"))


def unsharded_elements(parameters: Sequence[Tensor], ranks: int) -> int:
    """The elements that a gather of parameters has: FSDP2 pads each to as many rows on all ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() for p in parameters)


def copy_engines(
    model: nn.Module, group: dist.ProcessGroup, reductions: bool, fixed: int, device: torch.device
) -> list[str]:
    """Has FSDP2's gathers write to symmetric memory, where NCCL moves them by copy engines; says so if it cannot.

    With `reductions` their buffers lie in symmetric memory, too. `fixed`: gathers write to two buffers of so many bytes
    that are registered here, since a CUDA graph's capture can register none; 0: each registers its own.
    """
    if group.size() == 1 or not torch.cuda.is_available():
        return ["gathers are plain: copy engines need GPUs and two ranks"]
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")
    dist.barrier(group)  # a rendezvous needs the communicator, which is made by its first collective
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    gather = FixedGather(registered(fixed, group, device)) if fixed else None
    for module in sharded:
        if gather is not None:
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
        elif hasattr(module, "set_symm_mem_for_comm"):
            module.set_symm_mem_for_comm("NCCL")
        else:
            module.set_custom_all_gather(SymmetricGather())  # type: ignore[arg-type]
    # Not before all gathers are set: modules that are sharded together share what is set, and PyTorch refuses to set
    # gathers where the reduction is no longer its own.
    for module in sharded if reductions else []:
        module.set_custom_reduce_scatter(SymmetricReduceScatter())  # type: ignore[arg-type]
    return []


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


def registered(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Two buffers in symmetric memory that the ranks of `group` know."""
    memory = SymmetricMemory()
    buffers = [memory.allocate((nbytes,), dtype=torch.uint8, device=device) for _ in range(2)]
    memory.rendezvous(*buffers, group=group)
    return buffers


class FixedGather:
    """Gathers that take turns in two buffers.

    Two are enough: before FSDP2 starts a gather, the stream that fills its buffer waits for the last read of the gather
    before the previous one. In the forward the previous gather keeps its buffer until the next copy-out. In the
    backward each buffer is free behind its own copy-out.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        """`buffers`: two of equally many bytes, each registered as a whole."""
        self._buffers = buffers
        self._turn = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes > buffer.numel():
            raise ValueError(f"a gather of {nbytes} bytes does not fit into a buffer of {buffer.numel()}")
        return buffer[:nbytes].view(dtype).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduceScatter(SymmetricMemory):
    """A reduction as FSDP2 asks for it, by its mean; `set_symm_mem_for_comm` has one for sums only."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.rendezvous(input_tensor, output_tensor, group=group)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
