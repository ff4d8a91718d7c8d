"""The private names of PyTorch that zeroweave uses, in one place.

Each is a small function or alias with its reason, so that a release that moves a name breaks one file and
one test (`tests/test_torch_private.py`), which runs on the oldest and the newest supported version. No
other module touches a name that starts with an underscore or lives under `torch._*`. Supported: 2.11 to
2.13. Imports that are slow (Inductor) or that pull in the compiler stay inside the functions.
"""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors (and storage objects) share `storage`.

    Why: a flat is freed only when nobody views it.
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor under a storage object of its own, which does not own it.

    Whoever lends must keep `tensor` until the memory is not used any more. Why: backends keep what they are handed for
    as long as their threads please. The storage that counts its users is not among it.
    """
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(cast(Any, storage), 0, tensor.shape, tensor.stride())


def current_graph_task() -> int:
    """The id of the backward that this thread runs, -1 outside of one.

    Why: nested backwards are told apart.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the current backward has finished. Why: there is no public hook for it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of the storage of `tensor`; kept over `resize_`.

    Why: call-time binding needs it, cheaply.
    """
    return int(tensor.untyped_storage()._cdata)


def place_key(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of `tensor` and its offset there, in elements. Why: as `storage_key`."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, None if it is none. Why: a view is an owner of its base."""
    return tensor._base


def version(tensor: torch.Tensor) -> int:
    """How often `tensor` was written in place. Why: a write into a gathered parameter would be lost."""
    return int(tensor._version)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target. Why: one launch for a bucket's gradients instead of one each."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_add_(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    """Adds each term to its target. Why: as `foreach_copy_`."""
    torch._foreach_add_(list(targets), list(terms))


def has_symmetric_memory() -> bool:
    """Whether this PyTorch has symmetric memory. Why: `zeroweave doctor` says so; its module is private."""
    return importlib.util.find_spec("torch.distributed._symmetric_memory") is not None


def dynamo_backend(**compilers: Any) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """AOTAutograd as a Dynamo backend. Why: with plain callables AOTAutogradCache is never consulted."""
    from torch._dynamo.backends.common import aot_autograd

    return cast(Callable[..., Any], aot_autograd(**compilers))


def dynamo_example(placeholder: torch.fx.Node) -> Any:
    """The value that Dynamo saw for a placeholder of its graph. Why: only it tells parameters from inputs."""
    argument = placeholder.meta.get("grapharg")
    return None if argument is None else argument.example


def dynamo_backend_error() -> type[RuntimeError]:
    """What Dynamo wraps a backend's exceptions in (`inner_exception`).

    Why: ours must reach the user as such.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def dynamo_operator_error() -> type[RuntimeError]:
    """What Dynamo raises where it cannot capture `torch.cond` and the like. Why: one cause lies in our flats."""
    from torch._dynamo.exc import UncapturedHigherOrderOpError

    return UncapturedHigherOrderOpError


def dynamo_entries(code: types.CodeType) -> int:
    """How many compiled variants Dynamo keeps of a code object.

    Why: past the limit it runs eagerly, silently.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def keep_from_dynamo(code: types.CodeType) -> None:
    """Frames of `code`, and all that is called from them, run as they are, also where Dynamo looks at frames.

    Dynamo inlines such code as before while it traces another frame, and what is compiled by itself still is.
    Why: `torch.compiler.disable` breaks the graph where it is inlined, and costs a wrapper in each call.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def compile_with_limit(function: Callable[..., Any], limit: int, **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, **options)`, of which Dynamo compiles at most `limit` variants of a code object.

    Why: `torch.compile` takes a limit since 2.13. Before, it is in `torch._dynamo.config` only, where it is
    everybody's; it is set there while a call lasts, because Dynamo reads it whenever it meets a new variant.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = limit
        return torch.compile(function, **options)
    compiled = torch.compile(function, **options)
    scope = torch._dynamo.config.patch(recompile_limit=limit)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._dynamo.config.recompile_limit == limit:  # also where one call is inside another
            return compiled(*args, **kwargs)
        with scope:
            return compiled(*args, **kwargs)

    return call


def dynamo_attempts() -> list[Any]:
    """Dynamo's last attempts to compile a frame (up to 64), oldest first; see `CompilationMetrics`.

    Why: the reasons for recompilations and failures are kept nowhere else.
    """
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def dynamo_graph_breaks() -> dict[str, int]:
    """How often Dynamo broke a graph, by reason, in this process. Why: to say why code is not compiled."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def dynamo_frame_seconds() -> list[float]:
    """How long each frame took Dynamo so far in this process, backends included. To be read, not kept.

    Why: Dynamo goes on after its backend has returned (guards, bytecode), before it runs what it compiled.
    """
    from torch._dynamo.utils import compilation_time_metrics

    return compilation_time_metrics.get("_compile.compile_inner", [])


def aot_position(desc: Any) -> int | None:
    """The position among Dynamo's placeholders that an AOT input descriptor stands for, if it is plain."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    return desc.idx if isinstance(desc, PlainAOTInput) else None


def aot_base(desc: Any) -> Any:
    """The input that an AOT input was made from (a view's base, a subclass's component), else None."""
    from torch._functorch._aot_autograd import descriptors

    if isinstance(desc, (descriptors.ViewBaseAOTInput, descriptors.SyntheticBaseAOTInput)):
        return desc.base_of
    subclass = (
        descriptors.SubclassGetAttrAOTInput,
        descriptors.SubclassSizeAOTInput,
        descriptors.SubclassStrideAOTInput,
    )
    return desc.base if isinstance(desc, subclass) else None


def aot_gradient_of(desc: Any) -> int | None:
    """The position of the placeholder whose gradient an AOT output is, None if it is something else."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput

    return aot_position(desc.grad_of) if isinstance(desc, GradAOTOutput) else None


def aot_saved(index: int) -> Any:
    """The descriptor of the forward's `index`-th output that is saved for the backward."""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    return SavedForBackwardsAOTOutput(index)


def aot_metadata() -> Any:
    """What AOTAutograd knows about the graph that is being compiled (`ViewAndMutationMeta`), None outside.

    Why: mutated inputs, and donated buffers, which must be off (a backward may run with retain_graph).
    """
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fw_metadata


def aot_partition(
    joint: torch.fx.GraphModule, inputs: Any, budget: float = 1.0, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """AOTAutograd's min-cut partitioner, which leaves operators as they are.

    `budget`: the share of the activation bytes which it would save by itself that it may save. Why the rest: the
    budget is an option of the process. Below 1 the partitioner also recomputes what it takes for too costly
    otherwise, random numbers among it, which then are others, unless they must be saved; at 0 it does not look.
    Where nothing else is left to choose, it saves the very tuple of an operator with several outputs, which cannot
    be; recomputing all that it may is the same choice.
    """
    import torch._functorch.config as config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if budget == 1:
        with config.patch(activation_memory_budget=1.0):
            return min_cut_rematerialization_partition(joint, inputs, **options)
    keep_random_numbers(joint.graph)
    with config.patch(activation_memory_budget=max(budget, 1e-6)):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    (values,) = forward.graph.output_node().args
    assert isinstance(values, (tuple, list))
    if any(isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), tuple) for value in values):
        with config.patch(activation_memory_budget=1.0, aggressive_recomputation=True):
            return min_cut_rematerialization_partition(joint, inputs, **options)
    return forward, backward


def keep_random_numbers(graph: torch.fx.Graph) -> None:
    """Tags what draws random numbers to be saved, but for what a user's checkpoint recomputes.

    Attention draws none where its dropout is 0, though its operators count as random.
    """
    for node in graph.nodes:
        schema = operator_schema(node.target)
        if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:
            continue
        names = [argument.name for argument in schema.arguments]
        values = {argument.name: argument.default_value for argument in schema.arguments}
        values |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if values.get("dropout_p") != 0:
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def inductor_partition(
    joint: torch.fx.GraphModule, inputs: Any, budget: float = 1.0, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Inductor's joint passes and partitioner, with the fake mode that its random-operator passes need.

    `budget` as in `aot_partition`. Why its own partitioner then: random operators are to be found after the joint
    passes, which replace them.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.virtualized import V

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **more: Any) -> Any:
            return aot_partition(gm, joint_inputs, budget, **more)

        def uuid(self) -> str:
            return f"zeroweave {budget}"

    partitioner = config.custom_partitioner_fn if budget == 1 else Partitioner()
    with V.set_fake_mode(_fake_mode(joint)), config.patch(custom_partitioner_fn=partitioner):
        return partition_fn(joint, inputs, **options)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor expects to have been applied."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_compile(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, is_inference: bool
) -> Callable[[list[Any]], Any]:
    """Inductor's code for a graph, called with one list of arguments, which it empties.

    Compiled in a tracing context of its own: Inductor asserts that nobody else's output strides are in it.
    An inference graph has had no partition, so that Inductor's joint passes are run here.
    """
    from torch._dynamo.utils import get_inputs_devices
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    fake_mode = _fake_mode(graph)
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        if is_inference:
            devices = list(get_inputs_devices(inputs, graph))
            graph = _recursive_joint_graph_passes(graph, input_device=devices[0] if devices else None)
        pin_output_strides(graph)
        return compile_fx_inner(graph, inputs, is_backward=is_backward, is_inference=is_inference)


def inductor_reads_first(operators: Sequence[Any]) -> None:
    """Lets Inductor compute what reads the arguments of these operators in front of them, for good.

    Why: for an operator that writes an argument, as for any that it has no lowering for, Inductor puts the operator
    into its list and only then the elementwise reads that are pending, which then see the new value; those of
    views that it takes for new tensors (`view.dtype`) come later still.
    """
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
    from torch._inductor.virtualized import V

    def after_reads(operator: Any) -> Callable[..., Any]:
        fallback = fallback_handler(operator)

        def lower(*args: Any, **kwargs: Any) -> Any:
            lists = [value if isinstance(value, (list, tuple)) else [value] for value in (*args, *kwargs.values())]
            boxes = [value for values in lists for value in values if isinstance(value, TensorBox)]
            for box in boxes:
                box.realize()
            graph, names = V.graph, {box.get_name() for box in boxes}
            for buffer in graph.buffers:
                if not names.isdisjoint(buffer.get_inputs_that_alias_output()):
                    names.add(buffer.get_name())
            for name in sorted(names):
                graph.mark_buffer_mutated(name)
            return fallback(*args, **kwargs)

        return lower

    for operator in operators:
        if operator not in lowerings:
            register_lowering(operator, type_promotion_kind=None)(after_reads(operator))


def inductor_cache_hits() -> int:
    """How many graphs Inductor has found in its cache so far in this process. Why: it tells nobody else."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def inductor_lock_folder() -> Path | None:
    """Where Inductor keeps its file locks, beside its cache; None where the cache is switched off.

    Why: ranks that share the cache share this folder.
    """
    from torch._inductor import config
    from torch._inductor.codecache import get_lock_dir

    return Path(get_lock_dir()) if config.fx_graph_cache and not config.force_disable_caches else None


def inductor_settings() -> str:
    """PyTorch's version and a hash of Inductor's options. Why: they decide on the code, and on the cache's keys."""
    from torch._inductor import config

    return f"{torch.__version__} {config.get_hash().hex()}"


def pin_output_strides(graph: torch.fx.GraphModule) -> None:
    """Makes Inductor return every output with the strides that it has in the graph.

    Why: a context of its own cannot report other strides to AOTAutograd, which compiles the backward for
    them.
    """
    output = graph.graph.output_node()
    nodes = output.args[0]
    assert isinstance(nodes, (tuple, list))
    output.meta["user_visible_output_idxs"] = [i for i, n in enumerate(nodes) if isinstance(n, torch.fx.Node)]
    values = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in nodes]
    output.meta["original_output_strides"] = [v.stride() if isinstance(v, torch.Tensor) else None for v in values]


def _fake_mode(graph: torch.fx.GraphModule) -> Any:
    """The fake mode of a traced graph's values."""
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    values += [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    return torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])


def boxed(graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph's own Python code, called with one list of arguments, which it empties.

    Why: the public calling convention keeps all arguments alive until the end.
    """
    from torch.fx.graph import _BoxedCodeGen

    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    return cast(Callable[[list[Any]], Any], graph.forward)


def recomputing() -> bool:
    """Whether this forward is run again inside a backward by non-reentrant checkpointing.

    Why: its graph is thrown away, so that no gradient may be expected from it. The innermost saved-tensors
    hook tells: nothing else does.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def checkpoint_segment() -> weakref.ref[Any] | None:
    """What tells this non-reentrant checkpoint from others, while its function runs for the first time; None outside.

    One object for each, to be compared by identity. Why: in a backward everything inside runs again before anything
    inside is differentiated. The reference is weak because a checkpoint's hook holds its inputs.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside = hooks is not None and "_checkpoint_hook" in getattr(hooks[1], "__qualname__", "")
    return weakref.ref(hooks[1]) if inside else None


def wrapper_like(cls: type[AnyTensor], like: torch.Tensor) -> AnyTensor:
    """A `cls` without storage that has the metadata of `like`. Why: parameters at rest hold no bytes."""
    make: Callable[..., AnyTensor] = torch.Tensor._make_wrapper_subclass
    return make(
        cls,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=like.device,
        requires_grad=like.requires_grad,
    )


def without_torch_function() -> AbstractContextManager[None]:
    """Calls inside do not enter `__torch_function__`.

    Why: stubs answer metadata with PyTorch's own getters.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def metadata_getters() -> tuple[Callable[..., Any], ...]:
    """Private getters that describe a tensor without its values. Why: optimizers and `nn.Module` ask them."""
    names = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr")
    return tuple(getattr(torch.Tensor, name).__get__ for name in names)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Makes `isinstance(tensor, nn.Parameter)` true. Why: stubs stay where modules and users ask that."""
    tensor._is_param = True


def use_count(tensor: torch.Tensor) -> int:
    """How many owners the C++ tensor has: 1, 2 with an AccumulateGrad node, more in a live graph.

    Why: `swap_tensors` fails half way where a graph of an earlier forward still holds a parameter.
    """
    return int(tensor._use_count())  # type: ignore[attr-defined]


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether `register_hook` was used on `tensor`. Why: its hooks would never run on a sharded parameter."""
    return bool(tensor._backward_hooks)


def has_post_accumulate_hooks(tensor: torch.Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was used on `tensor`. Why: as for tensor hooks."""
    return bool(tensor._post_accumulate_grad_hooks)


def parameter_entries(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary that `module.weight` reads. Why: exchanging entries is how parameters come and go."""
    return module._parameters


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Why: the engine compiles regions itself."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` made it. Why: a forward that is compiled already is no code of a region."""
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The live dictionary of a module's children. Why: `_parameters` is not all that can be replaced."""
    return module._modules


def forward_pre_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The forward pre-hooks of `module`. Why: the old weight_norm is one, and keeps a graph alive."""
    return tuple(module._forward_pre_hooks.values())


def refresh_rnn_weights(module: nn.RNNBase) -> None:
    """Makes an RNN compute with its present `_parameters`. Why: it keeps a list of its weights of its own."""
    entries = module._parameters
    module._flat_weights[:] = [
        entries.get(name, old) for name, old in zip(module._flat_weights_names, module._flat_weights, strict=True)
    ]


def watch_rnn_weights(module: nn.RNNBase, watch: bool) -> None:
    """Lets an RNN hold weak references to its weights, or none.

    Why: a weakly referenced tensor cannot be swapped; without them the RNN trusts its list, which
    `refresh_rnn_weights` keeps right.
    """
    module._flat_weight_refs = [
        weakref.ref(weight) if watch and weight is not None else None for weight in module._flat_weights
    ]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` calls hooks, its own or global ones. Why: those expect one call a step."""
    from torch.optim import optimizer as module

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or module._global_optimizer_pre_hooks
        or module._global_optimizer_post_hooks
    )


def is_step_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether someone set `optimizer.step` on the object, learning rate schedulers (which only note that it
    was called) left out. Why: a wrapper of a user expects one call a step."""
    return "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")


def without_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of `optimizer`, but for its hooks and for a `step` of its own. Why: a copy that is tried out calls
    nobody, and `copy.deepcopy` of an optimizer leaves out all attributes but three."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }


def step_unheard(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class, without the hooks for all optimizers. Why: torch wraps `step` in a function
    that calls these."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer)


def foreach_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, 0-dim; fp32, or fp64 where one of them is, which PyTorch does not narrow.

    Why: one launch, and the public form rounds to bf16.
    """
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64 if wide else torch.float32))


def foreach_maxima(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each tensor, fp64, 0-dim; NaN where one is. Why: one launch, one reading pass."""
    return [maximum.double() for maximum in torch._foreach_norm(list(tensors), float("inf"))]


def mark_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tells AOTAutograd that `run` takes one list of arguments and empties it.

    Why: inputs are freed early.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def module_runner(name: str) -> types.FunctionType:
    """A new function `name(module, *args, **kwargs)` with a code object of its own.

    Why: Dynamo keeps what it compiled by code object, with one limit per process, deleted engines included,
    and remembers which sizes vary by file, line and name of the code. It does what
    `module(*args, **kwargs)` does where the module is not set to be compiled.
    """

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(co_name=name, co_qualname=name), globals(), name)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A copy of nested containers with `function` applied to every tensor.

    Why: pytrees are a private module.
    """
    if isinstance(tree, torch.Tensor):  # most arguments and results of modules are no containers
        return function(tree)
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, tree)


def is_operator(target: Any) -> bool:
    """Whether a graph node's target is an overload of an operator (`aten.add.Tensor`).

    Why: the class is private.
    """
    return isinstance(target, torch._ops.OpOverload)


def operator_schema(target: Any) -> Any:
    """The schema of an ATen operator in a graph, None for anything else. Why: its class has no public name."""
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs now adds to the `.grad` of this leaf.

    Why: `torch.autograd.grad` and `backward(inputs=...)` run backwards for other gradients only.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns instead
        return False


def owners(tensor: torch.Tensor) -> int:
    """How many references to a tensor there are, in Python and in C++, without those of its AccumulateGrad node.

    To be compared with a count that the same code took earlier. Why: the storage of a parameter that somebody keeps
    must not be freed. While C++ owns a tensor beside its Python object, PyTorch holds one more reference to that
    object; the node, which lives as long as any graph that the parameter is part of, reads no values.
    """
    cpp = use_count(tensor)
    return sys.getrefcount(tensor) + (cpp - 3 if cpp > 1 else 0)


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the content of two tensor objects; graphs stay with the content. RuntimeError if it is weakly owned.

    Why: `torch.utils.swap_tensors`, which does the same, refuses or poisons what is part of a live graph, so that
    the graph is not changed unawares; here it is to go on with the old content.
    """
    torch._C._swap_tensor_impl(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    with without_torch_function():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # else a later hook would replace the earlier
            mine, theirs = getattr(tensor, name), getattr(other, name)
            setattr(tensor, name, theirs)
            setattr(other, name, mine)


def symmetric_empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor [numel] that other GPUs of the node can read after `symmetric_rendezvous`.

    Why: the module is private although torch's own features are built on it.
    """
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(numel, dtype=dtype, device=device)


def symmetric_rendezvous(tensor: torch.Tensor, group: Any) -> Any:
    """The handle through which ranks reach each other's `tensor` (`get_buffer`, `barrier`). Collective.

    Why: as `symmetric_empty`.
    """
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.rendezvous(tensor, group=group)


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
    from torch.distributed import distributed_c10d as c10d

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


def coalescing(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """A scope whose all-gathers are launched together at its end; `works` of what it yields are then under way.

    Why: there is no public way to put several collectives into one launch.
    """
    from torch.distributed.distributed_c10d import _coalescing_manager

    return _coalescing_manager(group=group, device=device, async_ops=True)
