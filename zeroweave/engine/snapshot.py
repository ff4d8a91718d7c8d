"""What steps change, kept and brought back: for steps that are only tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zeroweave.checkpoint import random_numbers
from zeroweave.comm.ledger import Ledger
from zeroweave.engine.context import EngineContext
from zeroweave.engine.parameter_access import ParameterAccess
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.errors import EngineError


class Snapshot:
    """What the steps of an engine change, as it is now; `restore` brings it back, bit for bit.

    These are this rank's shards (the masters), optimizer state and groups, the LR scheduler, module buffers, the
    random numbers of a checkpoint, the schedule, and counters. Tensors and containers stay the same
    objects, with their contents again; what was added since is dropped. Costs a second copy of the shards of
    trained parameters, the optimizer state and the buffers, on their devices.
    """

    def __init__(self, context: EngineContext, window: Window, step: OptimizerStep) -> None:
        self._runtime, device = context.runtime, context.device
        self._schedule = self._runtime.replay.schedule
        self._runtime.transfers.finish()  # what is in host memory is read there
        self._trained = [b for b in self._runtime.buckets.values() if b.layout.trainable]
        owners = (self._runtime, self._runtime.replay, window, step)
        self._back: list[Callable[[], object]] = [owner.remember() for owner in owners]
        """each brings something back"""
        self._back.append(partial(context.progress.resume, context.progress.step))
        self._back.append(partial(random_numbers.restore, random_numbers.states(device), device))
        self._gathers = {bucket.id: bucket.gathers for bucket in self._runtime.buckets.values() if bucket.standing}
        """of those that stay gathered: how often they were"""
        self._seen: set[int] = set()
        for bucket in self._trained:
            for tensor in bucket.home.at_rest:
                self._keep(tensor)
        for module in context.model.modules():
            self._keep(module._buffers)
        if context.optimizer is not None:
            self._keep(context.optimizer.optimizer)
            for moments in context.optimizer.offload.compact.values():
                self._keep(moments.coded)
                self._keep(moments.slots)
            self._back.append(context.optimizer.states_changed)
        if hasattr(step.lr_scheduler, "__dict__"):
            self._keep(vars(step.lr_scheduler))

    def _keep(self, value: object) -> None:
        """Keeps the contents of tensors and containers, and the attributes of optimizers and schedulers.

        Not of parameters: outside of a step they have no values. Other objects are taken to be constant.
        """
        if isinstance(value, nn.Parameter) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        match value:
            case torch.Tensor():
                self._back.append(partial(value.copy_, value.detach().clone()))
            case dict():
                self._back += [value.clear, partial(value.update, dict(value))]
                for item in value.values():
                    self._keep(item)
            case list():
                self._back.append(partial(value.__setitem__, slice(None), list(value)))
                for item in value:
                    self._keep(item)
            case tuple():
                for item in value:
                    self._keep(item)
            case torch.optim.Optimizer() | LRScheduler():
                self._keep(vars(value))

    @torch.no_grad()
    def restore(self) -> None:
        """Everything is as it was. To be called between windows, with nothing gathered; local."""
        self._runtime.transfers.finish()
        self._runtime.replay.executor.staging.arrive_all()
        for bring_back in self._back:
            bring_back()
        for bucket in self._trained:
            bucket.put(bucket.values())  # what is gathered may be another tensor
            bucket.renew()
        for bucket in self._runtime.buckets.values():
            bucket.rewritten()
        standing = [b for b in self._runtime.buckets.values() if b.standing and not b.layout.trainable]
        since = [bucket.id for bucket in standing if self._gathers.get(bucket.id) != bucket.gathers]
        self._runtime.replay.lingering.expire(since)  # it may not be their values that were gathered
        self._runtime.next_window(self._schedule)


@contextmanager
def tried_out(context: EngineContext, window: Window, step: OptimizerStep, values: ParameterAccess) -> Iterator[Ledger]:
    """See `Engine.profiling`."""
    transport, shown = context.transport, values.shown
    with context.guard("profiling"):
        window.refuse_inside("profiling()")
        window.refuse_coalescing("profiling()")
        if not context.between_windows:
            raise EngineError("[ZW402] profiling() in the middle of a window: enter it after step() or zero_grad()")
        was_open = shown.is_open
        shown.close()
        window.abort()  # nothing stays gathered
        before = Snapshot(context, window, step)

    def reopen() -> None:
        if was_open and not context.guard.lost and not context.guard.dirty:
            with context.guard("profiling"):
                shown.open()

    with ExitStack() as after:  # all of it, whichever raises; the last first
        after.callback(reopen)
        after.callback(values.rewrite_views)
        after.callback(before.restore)
        after.callback(transport.skip, False)
        after.callback(window.abort)
        after.callback(shown.close)
        transport.skip(True)
        if was_open:
            shown.open()
            transport.skip(True)  # again: that gather belongs to no step
        yield transport.planned
