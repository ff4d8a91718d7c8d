"""Compiled regions: one Dynamo backend per engine, which makes templates and runs them on the runtime.

`torch.compile` captures a region; the backend below turns each captured graph into templates: a forward and
a backward, or one for inference. A template finds the buckets of its arguments when it is called, because
Dynamo runs it for every region with the same code (see `bind.py`). Communication is no part of it.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroweave._torch.aot import aot_metadata, dynamo_backend
from zeroweave._torch.autograd import past_hooks
from zeroweave._torch.dynamo import (
    compile_with_limit,
    dynamo_errors,
    dynamo_frame_seconds,
    dynamo_graph_breaks,
    module_runner,
)
from zeroweave._torch.inductor import inductor_cache_hits
from zeroweave.compile import lower as lowering
from zeroweave.compile.bind import Boxed, Roles, Split, TemplateHost, backward_binder, forward_binder, roles_of
from zeroweave.compile.destinations import begins_with_losses, made_gradients, write_into_arguments, written_gradients
from zeroweave.compile.fallback import explain, recompiled
from zeroweave.compile.lower import Kind, Lower
from zeroweave.compile.progress import Announcer, Phases
from zeroweave.errors import EngineError, ParameterError, ZeroweaveError
from zeroweave.notices import Journal


class Templates:
    """Everything one engine has compiled. Holds no tensors.

    Dynamo keeps backends, and what they compiled, where the garbage collector cannot look: they refer to this
    weakly, or an engine that is dropped without `destroy` would never be freed.

    `hooks`: the engine's for saved tensors, which those of compiled code need not pass; None: they need.
    `names` maps each region's module to its qualified name, which becomes the name of its calls. Dynamo compiles
    at most `recompile_limit` variants of all regions that share a callable (see `compile`). `activation_budget` is
    the share of activation bytes that forwards may save, `code` makes code of graphs.

    Counters: `graphs` captured by Dynamo, `templates` lowered,
    `found` of them in Inductor's cache; `phases` tells where the time went, `announcer` tells the user what takes it,
    `journal` what was compiled more than once and why.
    """

    def __init__(
        self,
        host: TemplateHost,
        names: Mapping[nn.Module, str],
        lower: Lower = "inductor",
        recompile_limit: int = 16,
        activation_budget: float = 1.0,
        announcer: Announcer | None = None,
        journal: Journal | None = None,
        code: lowering.Code = lowering.compile_graph,
        hooks: saved_tensors_hooks | None = None,
    ) -> None:
        self.announcer = announcer or Announcer(False, lambda: False)
        self._journal = journal or Journal(0)
        self.graphs = 0
        self.templates = 0
        self.found = 0
        self.phases = Phases()
        self.host: TemplateHost | None = host
        """the runtime; None after `close`"""
        self._names = dict(names)
        self._lower, self._code, self._hooks = lower, code, hooks
        self._limit, self._budget = recompile_limit, activation_budget
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._codes: dict[Hashable, types.CodeType] = {}
        self._breaks: dict[Hashable, list[str]] = {}
        self._running: list[nn.Module] = []
        self._own: dict[nn.Module, frozenset[int]] = {}

    def compile(self, key: Hashable, dynamic: bool | None = None) -> Callable[..., Any]:
        """The compiled callable of all regions of one class: `compiled(module, *args, **kwargs)`.

        It runs `module` as its own `__call__` would, hooks included. `key` says which regions share it, see
        `regions.region_key`; `dynamic` is torch.compile's. The first call compiles. While it runs, the caller
        must hold all buckets that hold parameters of `module`. Code that Dynamo cannot compile runs eagerly.

        Raises ParameterError where the region does with a parameter what a compiled graph must not.
        """
        if key not in self._compiled:
            run = module_runner(f"region_{uuid4().hex[:12]}")
            self._codes[key] = run.__code__
            me = weakref.proxy(self)
            compiled = compile_with_limit(
                run, self._limit, backend=lambda graph, inputs: me._backend(graph, inputs), dynamic=dynamic
            )
            self._compiled[key] = self._guarded(key, compiled)
        return self._compiled[key]

    def _guarded(self, key: Hashable, compiled: Callable[..., Any]) -> Callable[..., Any]:
        backend_error, operator_error = dynamo_errors()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module not in self._own:
                assert self.host is not None
                found = map(self.host.find, module.parameters())
                self._own[module] = frozenset(key[0] for key in found if key is not None)
            before = dynamo_graph_breaks() if key not in self._breaks else None
            frames, backends = len(dynamo_frame_seconds()), self.phases.total
            self._running.append(module)
            try:
                if before is None:
                    return compiled(module, *args, **kwargs)
                with self.announcer.phase(key):
                    return compiled(module, *args, **kwargs)
            except backend_error as error:
                cause = getattr(error, "inner_exception", None)
                if isinstance(cause, ZeroweaveError):
                    raise cause from None
                raise
            except operator_error as error:
                if "aliasing" not in str(error):
                    raise
                raise ParameterError(
                    "[ZW209] an operator with a body (torch.cond, scan, while_loop) in region "
                    f"{self._names.get(module)!r} reads several parameters of one bucket; they share storage, which "
                    "PyTorch does not allow there: compute with parameters before or after the operator, or read one "
                    "parameter per operator"
                ) from error
            finally:
                self._running.pop()
                if compiled_now := dynamo_frame_seconds()[frames:]:
                    self.phases.add("dynamo", sum(compiled_now) - (self.phases.total - backends))
                    self._tell_recompiled(self._names.get(module, ""), len(compiled_now))
                if before is not None:
                    after = dynamo_graph_breaks()
                    self._breaks[key] = [reason for reason, n in after.items() if n > before.get(reason, 0)]

        return call

    def _tell_recompiled(self, region: str, frames: int) -> None:
        """So many frames were compiled just now."""
        if reasons := recompiled(frames):
            self._journal.tell("recompiled", f"{region or 'the model'} is compiled once more: {'; '.join(reasons)}")

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.host is None:
            raise EngineError("[ZW403] a region of a destroyed engine was called")
        self.graphs += 1
        module = self._running[-1] if self._running else None
        name = self._names.get(module, "") if module else ""
        roles = roles_of(graph.graph, self.host, module, name)
        compilation = _Compilation(self, self._lower, self._budget, roles, name)
        with self.phases("aot"):
            run = dynamo_backend(
                fw_compiler=compilation.forward,
                bw_compiler=compilation.backward,
                inference_compiler=compilation.inference,
                partition_fn=compilation.partition,
                decompositions=lowering.decompositions(self._lower),
                keep_inference_input_mutations=True,
            )(graph, inputs)
        if self._hooks is None:
            return run
        reference = weakref.ref(self)

        def call(*args: Any) -> Any:
            templates = reference()
            hooks = None if templates is None else templates._hooks
            return run(*args) if hooks is None else past_hooks(hooks, run, args)

        return call

    def lowered(self, region: str, kind: Kind, graph: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """The code of one graph of a region."""
        hits = inductor_cache_hits()
        with self.announcer.graph(region, kind):
            run = self._code(self._lower, graph, inputs, kind, self.phases)
        self.templates += 1
        self.found += inductor_cache_hits() - hits
        return run

    def region(self) -> tuple[str, frozenset[int]] | None:
        """The name of the region that is running, and the buckets that its caller holds; None where none is."""
        if not self._running:
            return None
        module = self._running[-1]
        return self._names.get(module, ""), self._own[module]

    def fallback_reason(self, key: Hashable, module: nn.Module) -> str:
        """Why a call of `module`, compiled under `key`, ran no template, and what to do, in a few sentences.

        To be asked right after that call: Dynamo tells no more than what it did last.
        """
        return explain(self._codes[key], module, self._breaks.get(key, []), self._limit)

    def close(self) -> None:
        """Forgets the engine: nothing that Dynamo still keeps leads to the host or to a module."""
        for held in (self._compiled, self._codes, self._breaks, self._running, self._own, self._names):
            held.clear()
        self.host = self._hooks = None


class _Compilation:
    """The compilers of one Dynamo graph. The backward comes last, perhaps only when it is first needed."""

    def __init__(self, templates: Templates, lower: Lower, activation_budget: float, roles: Roles, region: str) -> None:
        self._templates = weakref.proxy(templates)
        self._find_engine = weakref.ref(templates)
        self._lower = lower
        self._budget = activation_budget
        self._roles = roles
        self._region = region
        self._split = Split()

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with self._templates.phases("partition"):
            forward, backward, self._split = lowering.partition(
                self._lower, self._roles, self._budget, joint, inputs, **options
            )
        return forward, backward

    def forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        return self._forward(graph, inputs, self._split)

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        return self._forward(graph, inputs, None)

    def _forward(self, graph: fx.GraphModule, inputs: Sequence[Any], split: Split | None) -> Boxed:
        metadata = aot_metadata()
        writes, host = lowering.may_write(graph.graph, self._roles, metadata.input_info), self._templates.host
        if writes and host is not None:
            host.watch_writes()
        metadata.bw_donated_idxs = []
        bind = forward_binder(self._find_engine, graph.graph, split)
        kind: Kind = "forward" if split else "inference"
        return bind(self._templates.lowered(self._region, kind, graph, inputs))

    def backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        written = written_gradients(graph.graph, self._roles)
        early = not begins_with_losses(graph.graph)
        made = made_gradients(graph.graph, self._roles) - (written.keys() if early else frozenset())
        bind = backward_binder(self._find_engine, graph.graph, self._split, self._roles, [*written], made, early)
        inputs = [*inputs, *write_into_arguments(graph, written)]
        return bind(self._templates.lowered(self._region, "backward", graph, inputs))
