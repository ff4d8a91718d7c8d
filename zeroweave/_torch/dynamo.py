"""Dynamo: what it compiles, what it keeps and why."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn


def module_runner(name: str) -> types.FunctionType:
    """A new function `name(module, *args, **kwargs)` with its own code object.

    Why: Dynamo keeps what it compiled by code object, with one limit per process, deleted engines included,
    and remembers which sizes vary by file, line and name of the code. It does what
    `module(*args, **kwargs)` does where the module is not set to be compiled.
    """

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(co_name=name, co_qualname=name), globals(), name)


def compile_with_limit(function: Callable[..., Any], limit: int, **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, **options)`, of which Dynamo compiles at most `limit` variants of a code object.

    Why: `torch.compile` takes a limit since 2.13. Before, it is in `torch._dynamo.config` only, where it is
    global; it is set there while a call lasts, because Dynamo reads it whenever it meets a new variant.
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


def keep_from_dynamo(code: types.CodeType) -> None:
    """Frames of `code`, and all that is called from them, run as they are, also where Dynamo looks at frames.

    Dynamo inlines such code as before while it traces another frame, and what is compiled by itself still is.
    Why: `torch.compiler.disable` breaks the graph where it is inlined, and costs a wrapper in each call.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def dynamo_example(placeholder: torch.fx.Node) -> Any:
    """The value that Dynamo saw for a placeholder of its graph. Why: only it tells parameters from inputs."""
    argument = placeholder.meta.get("grapharg")
    return None if argument is None else argument.example


def dynamo_errors() -> tuple[type[RuntimeError], type[RuntimeError]]:
    """What Dynamo wraps a backend's exceptions in (`inner_exception`); what says that it cannot capture `torch.cond`.

    Why: ours must reach the user as such, and our flats are one cause of the others.
    """
    from torch._dynamo.exc import BackendCompilerFailed, UncapturedHigherOrderOpError

    return BackendCompilerFailed, UncapturedHigherOrderOpError


def dynamo_entries(code: types.CodeType) -> int:
    """How many compiled variants Dynamo keeps of a code object.

    Why: past the limit it runs eagerly, silently.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


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

    Why: Dynamo continues after its backend has returned (guards, bytecode), before it runs what it compiled.
    """
    return _compilation_times().get("_compile.compile_inner", [])


@cache
def _compilation_times() -> dict[str, list[float]]:
    """Dynamo's own dictionary of times. Why: it is read with each call of a region, and an import takes longer."""
    from torch._dynamo.utils import compilation_time_metrics

    return compilation_time_metrics
