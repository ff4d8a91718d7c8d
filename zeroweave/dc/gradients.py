"""Gradients of backwards that a compiler pass drives by name.

A *window* is what the backwards up to an updating one add up to; the next backward begins a new one. ZeRO-1
adds up locally and reduces when the backward updates, ZeRO-2 and 3 reduce each time: that is a flag of the
graph. All else (where a reduced gradient goes, first or later) belongs to the parameter, and not to
the graphs that contribute, so that a recompilation inside a window changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import xxhash

from zeroweave._torch.autograd import at_end_of_backward, current_graph_task
from zeroweave.comm.ledger import Gauge
from zeroweave.dc.registry import RegisteredGraph, RegisteredParameter, Registry
from zeroweave.dc.targets import GradientPartition, SharesLayout
from zeroweave.errors import EngineError, ParameterError
from zeroweave.runtime.reductions import Reductions


class _Sum(NamedTuple):
    """What the backwards of a window that did not reduce add up to, and the dtype of the gradients in it."""

    value: torch.Tensor
    of: torch.dtype


class WindowGradients:
    """The reductions of one runtime by name. `gradients` counts the bytes of sums and partitions.

    There is one reduce bucket for each dtype of gradients that all ranks hold whole, and of others. One that waits
    holds references only. Its storage is the staging flat of a reduction: as large as the gradients in it, allocated
    from the flush until the result is settled. A gradient above `bucket_size`, in elements, makes one larger flat.
    At most `depth` reductions are in flight. All ranks add the same gradients in the same order.

    `check()` is called after each backward that has reduced, and before the next one begins. `rehearses`: True if
    results are zeros and no buffer is written.
    """

    def __init__(
        self,
        registry: Registry,
        reductions: Reductions,
        bucket_size: int,
        depth: int,
        gradients: Gauge,
        check: Callable[[], None],
        rehearses: bool = False,
    ) -> None:
        self._registry, self._reductions = registry, reductions
        self._rank, self._gradients, self._rehearses = registry.rank, gradients, rehearses
        self._size, self._depth, self._check = bucket_size, depth, check
        self._waiting: dict[tuple[torch.dtype, bool], dict[int, torch.Tensor]] = {}
        """by dtype, and whether all ranks hold them whole, the gradients by parameter"""
        self._numels: Counter[tuple[torch.dtype, bool]] = Counter()
        self._layouts: dict[tuple[tuple[int, ...], torch.dtype], SharesLayout] = {}
        self._sums: dict[int, _Sum] = {}
        self._written: set[int] = set()
        """parameters whose first result of the window is in its target: later ones are added"""
        self._partition: GradientPartition | None = None
        self._update: bool | None = None
        """True if the present backward ends the window; None before the first"""
        self._ended = True
        """True once everything of the present backward is reduced and settled"""
        self._settle_at_end = False
        self._task: int | None = None
        """the autograd backward that has contributed and not finished"""
        self._count = self._checked = 0
        """reductions, and those that there were at the last check"""
        self._forwards = False
        """True once a forward of the next window has begun"""

    def start_backward(self, update: bool) -> None:
        self.check_finished()
        if self._update and not self._ended:
            raise EngineError("start_backward: the updating backward was not ended; call end_backward or zero_grad()")
        self._flush_all()
        self._check_reductions()
        if self._update is not False:
            self._written.clear()
        self._update, self._ended, self._forwards = update, False, False

    @property
    def in_window(self) -> bool:
        """True if a backward has begun since the last updating one ended."""
        return self._update is not None and not (self._update and self._ended)

    def begin_forward(self) -> bool:
        """A forward begins. True if it is the first one since the last window."""
        self.check_finished()
        first, self._forwards = not (self.in_window or self._forwards), True
        return first

    def _check_reductions(self) -> None:
        """Everything of a backward is issued: if that was anything, the ranks may compare it."""
        if self._count != self._checked:
            self._checked = self._count
            self._check()

    def check_finished(self) -> None:
        """Raises if an earlier backward of autograd broke off."""
        if self._task is not None and self._task != current_graph_task():
            raise EngineError("an earlier backward did not finish; call zero_grad() and start the window anew")

    def reduce_grad(self, grad: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
        graph, parameter = self._registry.of(graph_id, ds_id)
        self._check_begun(f"reduce_grad of {parameter.name}")
        if tuple(grad.shape) != parameter.shape:
            raise ParameterError(f"{parameter.name}: its gradient has the shape {list(grad.shape)}")
        self._registry.check_tensor(parameter, "its gradient", grad)
        self._ended = False
        self._note_task()
        with torch.no_grad():
            self._contribute(graph, parameter, grad.detach().to(parameter.grad_dtype or grad.dtype))
        return grad.new_empty(0)

    def _check_begun(self, what: str) -> None:
        if self._update is None:
            raise EngineError(f"{what} outside of a backward: call start_backward first")
        if current_graph_task() < 0:
            self.check_finished()

    def _contribute(self, graph: RegisteredGraph, parameter: RegisteredParameter, grad: torch.Tensor) -> None:
        if not parameter.numel:
            return  # nothing to reduce, not even padding
        reduces = self._update or graph.reduces_always
        if reduces and parameter.id not in self._sums:
            self._add(parameter, grad)
            return
        self._add_up(parameter.id, grad)
        if reduces:
            self._reduce_sum(parameter.id)

    def _add(self, parameter: RegisteredParameter, gradient: torch.Tensor) -> None:
        """One more to be reduced; first flushes the bucket that it does not fit into, then the one that it fills."""
        name = (gradient.dtype, parameter.shares is None)
        parts = self._waiting.get(name, {})
        if (earlier := parts.get(parameter.id)) is not None:
            parts[parameter.id] = earlier + gradient  # out of place: a gradient may be one that the graph still reads
            return
        if parts and self._numels[name] + gradient.numel() > self._size:
            self._flush(name)
        self._waiting.setdefault(name, {})[parameter.id] = gradient
        self._numels[name] += gradient.numel()
        if self._numels[name] >= self._size:
            self._flush(name)

    def _flush_all(self) -> None:
        """Starts the reduction of everything that waits, in the order in which the buckets were begun."""
        for name in list(self._waiting):
            self._flush(name)

    def _add_up(self, ds_id: int, grad: torch.Tensor) -> None:
        if (old := self._sums.get(ds_id)) is None:
            wide = torch.promote_types(torch.float32, grad.dtype)
            new = _Sum(grad.to(wide, copy=True), grad.dtype)
            self._gradients.add(new.value.nbytes)
        else:
            new = _Sum(old.value.add_(grad), torch.promote_types(old.of, grad.dtype))
        self._sums[ds_id] = new

    def _reduce_sum(self, ds_id: int) -> None:
        """Hands the sum over as a gradient would be: in the dtype of the gradients, unless another is stated."""
        value, of = self._sums.pop(ds_id)
        self._gradients.add(-value.nbytes)
        self._add(self._registry.parameters[ds_id], value.to(self._reductions.dtype or of))

    def _note_task(self) -> None:
        """In a backward of autograd: its end reduces the gradients that have come together."""
        task = current_graph_task()
        if task >= 0 and self._task is None:
            self._task = task
            at_end_of_backward(self._task_ended)

    def _task_ended(self) -> None:
        self._task = None
        self._flush_all()
        if self._settle_at_end:
            self._finish()
        self._check_reductions()

    def end_backward(self, graph_id: int, release_reduce_buckets: bool | None = None) -> None:
        self._registry.graph(graph_id)
        self._check_begun("end_backward")
        if release_reduce_buckets is False:
            self._flush_all()
        elif release_reduce_buckets or current_graph_task() < 0:
            self._finish()
        else:
            self._settle_at_end = True
            self._note_task()
        if current_graph_task() < 0:
            self._check_reductions()

    @torch.no_grad()
    def _finish(self) -> None:
        """Everything that this backward has to reduce is reduced and settled."""
        self._settle_at_end = False
        if self._update:
            for ds_id in sorted(self._sums):  # ranks may have registered the parameters in another order
                self._reduce_sum(ds_id)
        self._flush_all()
        self._reductions.settle_all()
        if self._update and not self._rehearses:
            for parameter in self._registry.parameters.values():  # those of forgotten graphs, too
                if parameter.agreed and parameter.id not in self._written and parameter.buffer is not None:
                    parameter.buffer.zero_()  # no gradient in the whole window: not the last one's, either
        self._ended = True

    def update_param_grad_buffer(self, ds_id: int, grad_buffer: torch.Tensor) -> None:
        self._reductions.settle_all()  # what is under way may be on its way into the old one
        old = self._registry.parameter(ds_id).buffer
        self._registry.update_param_grad_buffer(ds_id, grad_buffer)
        if ds_id in self._written and old is not None:
            grad_buffer.copy_(old.view_as(grad_buffer))

    def _flush(self, name: tuple[torch.dtype, bool]) -> None:
        """Starts the reduction of one bucket."""
        parts = self._waiting.pop(name)
        del self._numels[name]
        while len(flying := self._reductions.in_flight) >= self._depth:
            self._reductions.settle(flying[0])
        ids = tuple(sorted(parts))  # regardless of the order in which this rank was handed them
        first = parts[ids[0]]
        layout = self._layout(ids, self._reductions.dtype or first.dtype)
        self._count += 1
        self._reductions.start(
            self._count,
            {slot: parts[ds_id] for slot, ds_id in enumerate(ids)},
            layout,
            first,
            partial(self._deliver, ids, layout),
            whole=layout.whole,
        )

    def _layout(self, ids: tuple[int, ...], dtype: torch.dtype) -> SharesLayout:
        layout = self._layouts.get((ids, dtype))
        if layout is None:
            parameters = [self._registry.parameters[ds_id] for ds_id in ids]
            shares = [p.shares for p in parameters if p.shares is not None]  # of all, or of none
            numels = [p.numel for p in parameters]
            # Nothing else distinguishes ranks' buckets that have other parameters of equal sizes.
            of_ids = xxhash.xxh3_64_intdigest(repr(ids).encode())
            layout = SharesLayout(of_ids, dtype.itemsize, self._registry.world, numels, shares or None)
            self._layouts[ids, dtype] = layout
        return layout

    @torch.no_grad()
    def _deliver(self, ids: tuple[int, ...], layout: SharesLayout, result: torch.Tensor) -> None:
        if self._rehearses:
            return
        starts = layout.starts(self._rank)
        for slot, ds_id in enumerate(ids):
            target, padding = self._target(self._registry.parameters[ds_id])
            piece = result.narrow(0, starts.get(slot, 0), target.numel())
            if ds_id in self._written:
                target.add_(piece)
            else:
                target.copy_(piece)
                padding.zero_()
                self._written.add(ds_id)

    def _target(self, parameter: RegisteredParameter) -> tuple[torch.Tensor, torch.Tensor]:
        """[elements] this rank's share of the parameter's gradient, where the optimizer will read it; its padding."""
        if parameter.buffer is None:
            flat = self._step_partition(parameter.id).view(parameter.id)
        else:
            flat = parameter.buffer.view(-1)
        held = parameter.numel if parameter.shares is None else parameter.shares[self._rank].numel
        return flat[:held], flat[held:]

    def _step_partition(self, ds_id: int | None = None) -> GradientPartition:
        """The window's partition, with `ds_id` (None: every parameter without a buffer that a graph ever had) in it."""
        old = self._partition
        if old is not None and ds_id in old.slices:
            return old
        bare = [p for p in self._registry.parameters.values() if p.buffer is None]
        held = [(p.id, p.shares[self._rank]) for p in bare if p.shares is not None]
        if old is not None and len(held) == len(old.slices):
            return old
        self._partition = new = GradientPartition(held, self._registry.device, self._gradients)
        if old is not None:  # a graph with other parameters came in the middle of the window
            for known in old.slices:
                new.view(known).copy_(old.view(known))
            old.release()
        return new

    def take_gradients(self) -> GradientPartition:
        if not (self._update and self._ended):
            raise EngineError("take_gradients: call it once, after the end of the updating backward")
        taken = self._step_partition()
        for ds_id in taken.slices:
            if ds_id not in self._written:
                taken.view(ds_id).zero_()
        self._partition = None
        self._update = None  # nothing can be added any more
        return taken

    def zero_grad(self) -> None:
        """Aborts the window: after a skipped step or an exception, on all ranks."""
        self._waiting.clear()
        self._numels.clear()
        self._reductions.abort()
        self._gradients.add(-sum(each.value.nbytes for each in self._sums.values()))
        self._sums.clear()
        self._written.clear()
        if self._partition is not None:
            self._partition.release()
            self._partition = None
        self._update, self._ended, self._task, self._settle_at_end = None, True, None, False
