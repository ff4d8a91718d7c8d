"""The engine: what a training loop calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, Unpack

import torch
from torch import nn

from zeroweave.comm.ledger import Ledger
from zeroweave.engine.calls import Calls, Loss, arguments_of, loss_of
from zeroweave.engine.checkpoints.checkpoints import Checkpoints, Plain, StrPath
from zeroweave.engine.context import EngineContext
from zeroweave.engine.logs.log import AfterStep
from zeroweave.engine.parameter_access import ParameterAccess, tell_dropped
from zeroweave.engine.scheduler import Plan, Recording, Scheduler
from zeroweave.engine.settings import PlanChanges, Prefetch, changes_of
from zeroweave.engine.snapshot import tried_out
from zeroweave.engine.stats import Stats
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.layout import BucketLayout, Fragment
from zeroweave.schedule import Instruction, Operations, Pass, Schedule

_P = ParamSpec("_P")
_R = TypeVar("_R")
_REASON: Final = "the engine compiles the model itself, and nothing can span its calls"


def _untraced(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """`method`, at which a program's own `torch.compile` breaks its graph.

    The engine compiles what the model computes. Around that it talks to other ranks and exchanges parameters, and
    Dynamo would end with an internal error in the middle of it.
    """

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            # What the engine compiles itself is compiled in there as usual. Made here: it imports all of Dynamo.
            return torch.compiler.disable(method, reason=_REASON)(*args, **kwargs)
        return method(*args, **kwargs)

    return called


class Engine:
    """Trains one model, sharded over the ranks of a process group. Made by `zeroweave.initialize`.

    Every method that computes or communicates is collective: all ranks call it in the same order. An engine that is
    dropped without `destroy` is garbage together with its model.

    Where `what` names a value of a parameter, it is "param", the value itself; "grad", the reduced gradient, which
    `gradient_clipping` clips in `step()`; or a key of the optimizer's state, such as "exp_avg". The name of an expert
    that not all ranks share means this rank's own; "all ranks" are then those that have the same.

    Attributes:
        module: the user's model.
        config: the `Config`, with all defaults.
        device: where this rank computes.
        rank: this process's number, from 0.
        world: the number of ranks.
    """

    def __init__(
        self,
        context: EngineContext,
        calls: Calls,
        scheduler: Scheduler,
        window: Window,
        step: OptimizerStep,
        parameter_access: ParameterAccess,
        checkpoints: Checkpoints,
        after_step: AfterStep,
        stats: Callable[[], Stats],
    ) -> None:
        self.module, self.config, self.device = context.model, context.config, context.device
        self.rank, self.world = context.control.rank, context.control.world
        self._context, self._runtime, self._guard = context, context.runtime, context.guard
        self._calls = calls  # forwards
        self._window, self._step = window, step  # backwards up to an optimizer step, and that
        self._parameter_access = parameter_access  # what users read and write
        self._checkpoints = checkpoints  # and what survives the run
        self._scheduler = scheduler  # which schedule the next window follows
        self._after_step, self._stats = after_step, stats  # what follows each `step()`; what is told

    # ------------------------------------------------------------------ looking at it
    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer."""
        return None if self._context.optimizer is None else self._context.optimizer.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The user's learning-rate scheduler."""
        return self._step.lr_scheduler

    @property
    def micro_steps(self) -> int:
        """Calls of `step()` so far."""
        return self._window.micro_steps

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, without those that were skipped."""
        return self._context.progress.step - self._step.skipped

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped, because gradients were not finite."""
        return self._step.skipped

    @property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """How parameters are laid out in buckets."""
        return tuple(b.layout for b in self._runtime.buckets.values())

    @property
    def stats(self) -> Stats:
        """Counters of this rank at this moment."""
        return self._stats()

    # ------------------------------------------------------------------ forward and backward
    @_untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's module; floating inputs are cast to `precision.params` where that is set."""
        self._after_step.batch(self.module.training and torch.is_grad_enabled(), args, kwargs)
        return self._forward(args, kwargs)

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], chunked: bool = False) -> Any:
        with self._guard("forward"):
            return self._calls.forward(args, kwargs, chunked)

    @_untraced
    def train_step(self, batch: Any, loss: Loss = None) -> torch.Tensor:
        """One micro-step: forward, loss, backward, `step()`. Returns the detached, unscaled loss.

        `batch` is a mapping (keyword arguments), a tuple or list (arguments) or one argument. The loss is
        `loss(output, batch)`, else the output itself if it is a tensor, else its `.loss`; with `loss="chunked"`
        a language model computes that without whole logits, as with the config's `loss`.
        """
        self._after_step.batch(True, batch)
        output = self._forward(*arguments_of(batch), loss == "chunked")
        with self._guard("loss"):
            found = loss_of(output, batch, loss)
        self._backward(found)
        self._after_step.loss(found, self._window.divisor)
        self._micro_step()
        return found.detach()

    @_untraced
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """The backward of `loss` times the loss scale, divided by the accumulation count unless told not to."""
        self._backward(loss, retain_graph, scale_wrt_gas)
        self._after_step.loss(loss, self._window.divisor if scale_wrt_gas else 1)

    def _backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        with self._guard("backward"):
            self._window.backward(self._window.scale(loss, by_steps=scale_wrt_gas), retain_graph)

    @_untraced
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, divided by the accumulated micro-steps; float32 at least where it is scaled."""
        self._after_step.loss(loss, self._window.divisor)
        return self._window.scale(loss)

    @property
    def loss_scale(self) -> float:
        """What the losses of the present window are multiplied by; 1 where nothing is scaled."""
        return self._step.scaler.loss_scale.value

    # ------------------------------------------------------------------ windows
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add their gradients up locally; a later one outside, or `step()`, reduces.

        At any stage, at the price of a full local gradient. What counts is where the backward runs, not where its
        forward did. EngineError inside `coalesce_grad_reduction()`.
        """
        with self._guard("no_sync"):
            self._window.refuse_coalescing("no_sync()")
        with self._window.deferring("no_sync"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards, one reduction: the block of one optimizer step. Collective.

        Every backward inside adds its gradients up locally, in `precision.accumulate`; the end of the block reduces
        each bucket once, and the next `step()` uses the result and ends the window, unless
        `set_gradient_accumulation_boundary` says otherwise, which holds to the end of the block. Losses are not
        divided. From the first backward to the end of the block this rank holds a full local gradient.

        An exception that leaves the block on all ranks leaves it unreduced until `zero_grad()`. EngineError in another
        such block, in `no_sync()`, in a forward or backward, and for `step()` and all else inside that needs reduced
        gradients; NotImplementedError for pipeline modules and optimizers that hide their parameters.
        """
        with self._guard("coalesce_grad_reduction"):
            self._window.refuse_block()
        with self._window.deferring("coalesce_grad_reduction"), self._guard.around("coalesce_grad_reduction"):
            yield
        with self._guard("the end of coalesce_grad_reduction"):
            self._window.reduce()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the optimizer step follows the present backward.

        As the caller has said; else after `gradient_accumulation_steps` micro-steps, and after a coalesced block.
        """
        return self._window.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says whether the present micro-step ends its window, until said otherwise; None: count again."""
        self._window.set_boundary(is_boundary)

    @_untraced
    def step(self) -> None:
        """Ends a micro-step; at the boundary, the optimizer step. To be called after every backward."""
        self._micro_step()

    def _micro_step(self) -> None:
        with self._guard("step"):
            boundary = self._window.ends()
            self._step.take(boundary)
            self._window.micro_step_ended(boundary)
        self._checkpoints.step_ended(boundary)
        self._after_step.step_ended(boundary)

    def was_step_applied(self) -> bool:
        """True if the last `step()` ran the optimizer: not inside a window, nor where gradients were not finite."""
        return self._step.applied

    @_untraced
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the window's gradients to a global 2-norm of at most `max_norm`; returns the norm before.

        The norm is float32, 0-dim, on the engine's device, without the loss scale; each parameter counts once. To be
        called between the boundary's backward and `step()`. Collective.
        """
        return self._step.clip(max_norm)

    def get_global_grad_norm(self) -> float | None:
        """The global 2-norm that the last clipping found, before it; None if nothing was clipped yet."""
        return self._step.norm

    @_untraced
    def zero_grad(self) -> None:
        """Drops the window's gradients; after an exception on all ranks, all that it left."""
        with self._guard("zero_grad", clean=False):
            self._window.abort()
        self._after_step.window_ended()

    def profiling(self) -> AbstractContextManager[Ledger]:
        """Inside, steps run without any communication; afterwards everything that they changed is as before.

        Yields the ledger of what they would have sent. Losses and norms mean nothing inside, and values cannot be
        read. Costs a second copy of the trained shards, the optimizer's state and the module's buffers. All ranks
        enter it, between windows; each may run any number of steps inside.
        """
        return tried_out(self._context, self._window, self._step, self._parameter_access)

    # ------------------------------------------------------------------ values
    def full(self, parameter: nn.Parameter | str, what: str = "param") -> torch.Tensor | None:
        """A copy of the whole value, in the parameter's shape, on the engine's device.

        "param" is the float32 master where there is one, "grad" is float32 at least. What the optimizer holds for a
        parameter as a whole, such as its step counter, comes as it is. None for a gradient that no rank has. Costs one
        gather of the parameter's bucket. EngineError for what the model or the optimizer does not have.
        """
        return self._parameter_access.full(parameter, what)

    def set_full(self, parameter: nn.Parameter | str, value: torch.Tensor, what: str = "param") -> None:
        """Replaces a whole value; `value` has the parameter's shape, any dtype, and is the same on all ranks.

        Each rank keeps its part. Parameters change between two optimizer steps' windows only, gradients between the
        boundary's backward and `step()`, optimizer state once the optimizer holds it.
        """
        self._parameter_access.set_full(parameter, value, what)

    def fragment(self, parameter: nn.Parameter | str) -> Fragment:
        """Which elements of a parameter this rank has: `numel` from `offset` on, of the flattened parameter."""
        return self._parameter_access.fragment(parameter)

    def local(self, parameter: nn.Parameter | str, what: str = "param") -> torch.Tensor | None:
        """A copy of this rank's fragment [numel of the fragment] of what `full` gives."""
        return self._parameter_access.local(parameter, what)

    def set_local(self, parameter: nn.Parameter | str, value: torch.Tensor, what: str = "param") -> None:
        """Replaces this rank's fragment; `value` is [numel of the fragment]. Else as `set_full`."""
        self._parameter_access.set_local(parameter, value, what)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The reduced gradients, full, float32, on the CPU of every rank; `gradient_clipping` clips in `step()`.

        None where no rank had a gradient. To be called between the boundary's backward and `step()`. Collective.
        """
        return self._parameter_access.gradients()

    def full_parameters(self) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Everything unsharded: inside, the module's parameters are full and may be read and written.

        Yields them by name. What is written is kept at the end; all ranks must write the same, bit by bit. Where they
        do not, EngineError names the parameters, and nothing is kept; nor is it when an exception leaves the block.
        Collective; not inside a forward or backward.
        """
        return self._parameter_access.full_parameters()

    def state_dict(self) -> dict[str, Any]:
        """What the model's own `state_dict()` would be on rank 0, in host memory, in the model's original dtypes.

        The modules make it: their hooks and extra state (`get_extra_state`) are asked, on rank 0. Experts that not all
        ranks share are there several times: "name@i" is that of rank i of its group.
        Parameters come from the float32 masters. `{}` on the other ranks. Collective.
        """
        return self._parameter_access.state_dict()

    def full_on_rank_0(self) -> AbstractContextManager[dict[str, Any]]:
        """Yields `state_dict()`; inside, rank 0's module has all parameters in host memory, for code that saves it.

        Nothing is computed inside, and nothing kept that is written. Collective.
        """
        return self._parameter_access.full_on_rank_0()

    def stream_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers, by name, one after the other, for models larger than the host's memory.

        No hooks and no extra state: a warning names the modules that have some. One bucket is full at a time, on the
        device. All ranks iterate, and do nothing else with the engine meanwhile;
        only rank 0 is given anything.
        """
        return self._parameter_access.stream_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes rank 0's full `state_dict` on all ranks; all that the model's own has must be there.

        Any mapping, such as one that reads tensors when they are asked for, which they are twice. Where modules load
        in their own way (hooks, extra state, methods), rank 0 holds the whole model in host memory meanwhile. All
        ranks get its extra state. ParameterError, which changes nothing, for what does not fit. Collective; the other
        ranks' argument is ignored.
        """
        self._parameter_access.load_state_dict(state_dict)

    # ------------------------------------------------------------------ checkpoints
    def save(
        self,
        path: StrPath,
        tag: str | None = None,
        client_state: Plain | None = None,
        data: Any = None,
        asynchronous: bool = False,
    ) -> str:
        """Writes a checkpoint of the whole run to the folder `path`, which all ranks share; returns its tag.

        `tag`: by default "step-" and the optimizer steps. `client_state`: what the program wants back, values and
        tensors. `data`: a sampler or loader with a `state_dict`. `asynchronous`: while the next steps run; the next
        save, `load` and `destroy` wait for it. Rank 0's tag and values count. After any `step()`. Collective.
        CheckpointError on all ranks where one cannot write, from here or from `step`; all is then as before.
        """
        return self._checkpoints.save(path, tag, client_state, data, asynchronous)

    def load(
        self, path: StrPath, tag: str | None = None, strict: bool = True, data: Any = None, missing_ok: bool = False
    ) -> dict[str, Any]:
        """Continues where `save` was called, at any stage and with any number of ranks; returns the `client_state`.

        `tag`: None for the latest. `data`: what `save` was given, to be set. Every byte is checked first:
        CheckpointError, which changes nothing, for what is broken, or of another model. Not `strict`: what is missing
        stays as it is, and what is left over is not read. `missing_ok`: where there is no checkpoint yet, nothing
        happens, and `{}` comes back. Collective.
        """
        return self._checkpoints.load(path, tag, strict, data, missing_ok)

    def on_signal(self, client_state: Callable[[], Plain] | None = None, data: Any = None) -> None:
        """What `save` is given where a signal asks for it (`checkpoint.save_on_signal`), and called for then."""
        self._checkpoints.on_signal(client_state, data)

    def export(self, path: StrPath, dtype: torch.dtype | None = None, shard_bytes: int = 5 << 30) -> None:
        """Writes what `stream_state_dict` has to the folder `path`, as Hugging Face has it: safetensors and an index.

        A model of transformers gets its `config.json` and `generation_config.json`, and no tokenizer. Floating dtypes
        become `dtype`; None: the model's own. One bucket is whole at a time. The folder is new. Collective.
        """
        self._checkpoints.export(path, dtype, shard_bytes)

    # ------------------------------------------------------------------ schedules
    @property
    def schedule(self) -> Schedule | None:
        """The schedule that the next step follows; None before the first step has been recorded."""
        return self._scheduler.schedule

    @property
    def executed(self) -> tuple[Instruction, ...]:
        """The instructions of the last optimizer step: those of `schedule`, in its order, if it followed that."""
        return self._step.executed

    def record(self) -> AbstractContextManager[Recording]:
        """Times whole steps inside, while they train as usual. Collective.

        What it yields has, at the end of the block, `operations` (every collective of the last step, in order, with
        this rank's times) and `graph` (what depends on what). Costs a few microseconds for each instruction, and one
        wait for the device at the end of each step.
        """
        return self._scheduler.record()

    def compile_schedule(
        self, operations: Operations, prefetch_ahead: Prefetch | None = None, **changes: Unpack[PlanChanges]
    ) -> Plan:
        """Makes a schedule from what was recorded; nothing changes yet. The changes are those of `reschedule`.

        All ranks must make the same plan before they use it. EngineError for a setting that is refused, ScheduleError
        where one of your passes breaks the schedule.
        """
        with self._guard("compile_schedule"):
            return self._scheduler.plan(operations, changes_of(prefetch_ahead, **changes))

    def use(self, plan: Plan) -> None:
        """Follows `plan` from the next step on; AgreementError unless all ranks do. Collective, between two steps."""
        plan.use()

    def reschedule(self, prefetch: Prefetch | None = None, **changes: Unpack[PlanChanges]) -> Schedule | None:
        """Changes how the next steps communicate; nothing is recompiled. Collective, between two optimizer steps.

        What is not given, or None, stays. Returns the new schedule; None where no step has been recorded yet: the
        settings then hold for the first one. Raises as `compile_schedule` and `use` do.
        """
        with self._guard("reschedule"):
            return self._scheduler.reschedule(changes_of(prefetch, **changes))

    def register_pass(self, new: Pass, after: str | None = None) -> None:
        """Adds your pass after the one called `after`, or after all; on all ranks.

        A pure function from a `Schedule` to a `Schedule`, which takes effect with the next one that is made. One that
        makes a schedule illegal is a ScheduleError that names the pass and the instruction, and is taken back.
        """
        with self._guard("register_pass"):
            self._scheduler.register_pass(new, after)

    def unregister_pass(self, old: Pass) -> None:
        """Removes one of your passes; on all ranks. The next schedule is made without it."""
        with self._guard("unregister_pass"):
            self._scheduler.unregister_pass(old)

    # ------------------------------------------------------------------ its end
    def train(self, mode: bool = True) -> Engine:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """`module.eval()`."""
        return self.train(False)

    def destroy(self, optimizer_state: bool = True) -> None:
        """Gives the model back as an ordinary one with its full parameters, and ends what the engine started.

        Collective. The optimizer has the user's parameters again, and on every rank the state of whole ones, in its
        dtypes (float32 at least): on the engine's device if all ranks have room there, else in host memory. Where
        neither has room, a warning says so, and it has none, as with `optimizer_state=False`. `initialize` takes both
        over as they are. A process group stays, also one that `initialize` has started.
        """
        if self._guard.destroyed:
            return
        with self._guard("destroy" if optimizer_state else "destroy(optimizer_state=False)", clean=False):
            self._checkpoints.close()
            self._after_step.close()
            values, (states, lacking) = self._parameter_access.whole(optimizer_state)
        self._calls.remove()
        if (graphs := self._runtime.graphs) is not None:
            graphs.close()  # they have memory, and views of parameters
        self._parameter_access.give_back(values, states)
        self._guard.close()
        self._context.ends.close()
        if lacking is not None:  # last: a filter may make an exception of it
            tell_dropped(lacking, self.rank)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.destroy()  # after an exception the other ranks may be anywhere: nothing collective is left to do
