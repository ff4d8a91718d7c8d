"""Which models can be sharded: every parameter and buffer is checked before any is touched.

`check_structure` raises one error with all offenders, grouped by reason, each reason with its cure. It changes
nothing and allocates nothing; after it has passed, `module_parameters.rest` is expected to succeed.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.weight_norm import WeightNorm

from zeroweave._torch.modules import forward_pre_hooks, is_compiled_function, is_compiled_in_place, watch_rnn_weights
from zeroweave._torch.storages import storage_key, use_count
from zeroweave._torch.tensors import post_accumulate_hooks
from zeroweave.errors import ParameterError
from zeroweave.parameters.foreign import own_parameters
from zeroweave.parameters.stub import NO_POST_HOOKS, AtRest

_TRANSIENT_SECONDS: Final = 2.0
"""How long threads of a communication backend may still hold what a collective was handed."""

# Classes of torch that wrap a model, by name: importing FSDP only to ask for its class would be slow.
_WRAPPERS = {
    "OptimizedModule": "compiled with torch.compile; pass the plain model, the engine compiles its regions",
    "DistributedDataParallel": "wrapped in DistributedDataParallel; pass the plain model",
    "DataParallel": "wrapped in DataParallel; pass the plain model",
    "FullyShardedDataParallel": "wrapped in FullyShardedDataParallel; pass the plain model",
    "FSDPModule": "sharded by fully_shard; pass the plain model",
    "ScriptModule": "a TorchScript module; pass the Python module it was made from",
}


def check_structure(model: nn.Module) -> None:
    """Passes if every parameter of `model` can be put to rest and every buffer be shared between ranks.

    Else one ParameterError names all offenders.

    Collects garbage first, so that graphs that are no longer held do not count. Where the model is
    wrapped or has an engine already, only that is reported.
    """
    gc.collect()
    _raise_if_any(_of_wrappers(model))
    parameters = own_parameters(model)
    plain = {name: p for name, p in parameters.items() if type(p) is nn.Parameter}
    ordinary = {name: p for name, p in plain.items() if p.layout is torch.strided and not p.is_meta}
    _raise_if_any(
        [
            *_of_embeddings(model),
            *((reason, name) for name, parameter in parameters.items() for reason in _kind_reasons(parameter)),
            *((reason, name) for name, buffer in model.named_buffers() for reason in _buffer_reasons(buffer)),
            *_of_sharing(model, ordinary),
            *_of_uses(model, ordinary),
        ]
    )


_Offender: TypeAlias = tuple[str, str]
"""A reason, and the name that it holds for."""


def _raise_if_any(offenders: Iterable[_Offender]) -> None:
    """Reasons in the order in which they were first met, each with all of its names."""
    found: dict[str, dict[str, None]] = {}
    for reason, name in offenders:
        found.setdefault(reason, {})[name] = None
    if found:
        lines = [f"  {', '.join(names)}: {reason}" for reason, names in found.items()]
        raise ParameterError("[ZW202] the model cannot be sharded; nothing was changed:\n" + "\n".join(lines))


def _of_wrappers(model: nn.Module) -> Iterator[_Offender]:
    if any(isinstance(parameter, AtRest) for parameter in model.parameters()):
        yield "has an engine already; use it, or call its destroy() first", "the model"
        return  # it stands where module.compile() would
    for path, module in model.named_modules():
        name = path or "the model"
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.partition(".")[0] == "torch":
                yield _WRAPPERS[base.__name__], name
                break
        else:
            if is_compiled_in_place(module):
                yield "compiled with module.compile(); leave that out, the engine compiles its regions", name
            if is_compiled_function(vars(module).get("forward")):
                yield "forward = torch.compile(...); leave that out, the engine compiles its regions", name


def _of_embeddings(model: nn.Module) -> Iterator[_Offender]:
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            name = f"{path}.weight" if path else "weight"
            if module.sparse:
                yield "has sparse gradients; build the embedding with sparse=False", name
            if module.max_norm is not None:
                reason = "is renormalised inside forward (max_norm), which a gathered copy would lose"
                yield f"{reason}; build the embedding with max_norm=None", name


def _kind_reasons(parameter: nn.Parameter) -> Iterator[str]:
    """What is wrong with a parameter taken alone."""
    if isinstance(parameter, UninitializedParameter):
        yield "has no shape yet (a lazy module); run one forward before zeroweave.initialize"
    elif type(parameter) is not nn.Parameter:
        kind = type(parameter).__name__
        yield f"is a tensor subclass ({kind}); only plain nn.Parameter objects can be trained"
    elif parameter.layout is not torch.strided:
        yield f"has layout {parameter.layout}; convert it with to_dense()"
    elif parameter.is_quantized or parameter.is_complex():
        yield f"has dtype {parameter.dtype}, which is not supported; store it as a real dtype"
    elif not _is_dense(parameter):
        yield "has gaps or overlaps in its own memory (a slice or an expanded tensor); make it contiguous"


def _buffer_reasons(buffer: torch.Tensor) -> Iterator[str]:
    """Why rank 0's values of a buffer could not be written into it."""
    if isinstance(buffer, UninitializedBuffer):
        yield "is a buffer without a shape (a lazy module); run one forward before zeroweave.initialize"
    elif buffer.layout is not torch.strided:
        yield f"is a buffer of layout {buffer.layout}; register its to_dense(), or keep it as a plain attribute"
    elif any(size > 1 and stride == 0 for size, stride in zip(buffer.size(), buffer.stride(), strict=True)):
        yield "is an expanded buffer, whose elements share memory; register a clone() of it"


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill a stretch of memory, each place once, in any order of dimensions."""
    expected = 1
    sizes = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted((stride, size) for stride, size in sizes if size != 1):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor and the first and last byte of it (exclusive) that the tensor may touch."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    last = first + int(reach) + 1
    return storage_key(tensor), first * tensor.itemsize, last * tensor.itemsize


def _of_sharing(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[_Offender]:
    """Distinct parameters that overlap, and parameters that overlap a buffer: training would change both."""
    spans = [(*_span(p), name, True) for name, p in parameters.items() if p.numel()]
    spans += [
        (*_span(b), name, False)
        for name, b in model.named_buffers()
        if type(b) in (torch.Tensor, nn.Buffer) and b.layout is torch.strided and not b.is_meta and b.numel()
    ]
    spans.sort()
    for i, (storage, _, stop, name, is_parameter) in enumerate(spans):
        for other_storage, start, _, other, other_is_parameter in spans[i + 1 :]:
            if other_storage != storage or start >= stop:
                break
            if is_parameter and other_is_parameter:
                for one, two in ((name, other), (other, name)):
                    yield f"shares memory with {two}; tie them by using one Parameter object, or clone it", one
            elif is_parameter or other_is_parameter:
                one, two = (name, other) if is_parameter else (other, name)
                yield f"shares memory with the buffer {two}; clone one of them", one


def _of_uses(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[_Offender]:
    """References that would not survive the exchange: weak ones, graphs, hooks and gradients."""
    normed = {
        id(parameter)
        for module in model.modules()
        if any(isinstance(hook, WeightNorm) for hook in forward_pre_hooks(module))
        for parameter in module.parameters(recurse=False)
    }
    watched = _weakly_referenced(model, parameters)
    _await_references(parameters)
    for name, parameter in parameters.items():
        if name in watched:
            yield "weakly referenced (weakref, WeakKeyDictionary, an earlier torch.compile); drop those", name
        if _is_in_use(parameter):
            if id(parameter) in normed:
                reason = "in the graph of torch.nn.utils.weight_norm; use torch.nn.utils.parametrizations"
            else:
                reason = "in a live autograd graph; delete earlier losses and outputs"
            yield reason, name
        if post_accumulate_hooks(parameter):
            yield f"has hooks of register_post_accumulate_grad_hook, which would never run: {NO_POST_HOOKS}", name
        if parameter.grad is not None:
            yield "has a gradient; call model.zero_grad() first", name


def _is_in_use(parameter: nn.Parameter) -> bool:
    """True if anything in C++ but an AccumulateGrad node holds the parameter."""
    return use_count(parameter) > 1 + parameter.requires_grad


def _await_references(parameters: dict[str, nn.Parameter]) -> None:
    """Waits until references that no program holds are gone: those of a finished collective over the parameters."""
    end = time.monotonic() + _TRANSIENT_SECONDS * dist.is_initialized()
    while time.monotonic() < end and any(map(_is_in_use, parameters.values())):
        time.sleep(0.02)


def _weakly_referenced(model: nn.Module, parameters: dict[str, nn.Parameter]) -> set[str]:
    """Parameters with weak references other than those that RNN modules keep to their own weights."""
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for rnn in rnns:
        watch_rnn_weights(rnn, watch=False)
    try:
        return {name for name, parameter in parameters.items() if weakref.getweakrefs(parameter)}
    finally:
        for rnn in rnns:
            watch_rnn_weights(rnn, watch=True)
