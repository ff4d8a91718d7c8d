"""Gradients on their way from a backward into the window: where code may write or add them, and which count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroweave._torch.autograd import accumulates, current_graph_task, returns
from zeroweave.layout import SlotKey
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.replay import Replay


class Delivery:
    """Takes the gradients of compiled and of eager backwards. Parameters are (bucket id, slot index).

    `note_backward` (see `Runtime`) is called for each backward that delivers, `delivered(bucket id, slot index)` after
    each eager gradient.

    The gradients of eager code arrive on the stream of the last outermost forward; a CPU has none. Autograd delivers a
    leaf's gradient on the stream on which the leaf's `AccumulateGrad` node was made. That node outlives its forward
    where a graph is kept, so it may belong to another stream than the present forward.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        gradients: Gradients,
        replay: Replay,
        device: torch.device,
        note_backward: Callable[..., None],
        delivered: Callable[[int, int], None],
    ) -> None:
        self._buckets, self._gradients, self._replay, self._device = buckets, gradients, replay, device
        self._note_backward, self._delivered = note_backward, delivered
        self._whole = -1
        """the graph task that is known to accumulate into every parameter that it reaches"""
        self._stream: torch.cuda.Stream | None = None
        """that of the last outermost forward; None: on a CPU, which has one order"""

    def begin_forward(self) -> None:
        """The engine computes on the current stream from now on."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    def accumulates_all(self, task: int) -> None:
        """This graph task is known to accumulate into every parameter that it reaches."""
        self._whole = task

    def destinations(self, parts: Sequence[SlotKey]) -> list[torch.Tensor | None]:
        """Where a compiled backward may write these gradients, (bucket id, slot index); see `Gradients.destination`."""
        if not self._replay.reducing:
            return [None] * len(parts)
        return self._of_wanted(parts, self._gradients.destination)

    def sums(self, parts: Sequence[SlotKey]) -> list[torch.Tensor | None] | None:
        """The sums to which a compiled backward may add these (bucket id, slot index); see `Gradients.sum_of`."""
        if self._replay.reducing and not self._gradients.unreduced:
            return None
        found = self._of_wanted(parts, self._gradients.sum_of)
        return None if all(each is None for each in found) else found

    def _of_wanted(
        self, parts: Sequence[SlotKey], ask: Callable[[int, int], torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The result of `ask` for each of these that the window wants without running hooks; None for others."""
        wanted = {key for key in self._wanted(parts) if not self._buckets[key[0]].hooks(key[1])}
        return [ask(*key) if key in wanted else None for key in parts]

    def _wanted(self, parts: Sequence[SlotKey]) -> Sequence[SlotKey]:
        """`torch.autograd.grad` and `backward(inputs=…)` run a compiled backward whose gradients no window wants.

        Nor does it want those of parameters that were switched off since the forward.
        """
        if current_graph_task() == self._whole:
            return [(bucket, slot) for bucket, slot in parts if self._buckets[bucket].real[slot].requires_grad]
        return [key for key in parts if accumulates(self._buckets[key[0]].real[key[1]])]

    def deliver(
        self,
        announced: Sequence[SlotKey],
        parts: Sequence[tuple[int, int, torch.Tensor | None]],
        made: Set[SlotKey] = frozenset(),
    ) -> Set[SlotKey]:
        """Gradients of a compiled backward; see `Gradients.deliver`. Returned: those that autograd returns instead."""
        asked: Set[SlotKey] = frozenset()
        if len(wanted := self._wanted(announced)) < len(announced):
            others = set(announced) - (found := set(wanted))
            asked = {key for key in others if returns(self._buckets[key[0]].real[key[1]])}
            announced, parts = wanted, [part for part in parts if part[:2] in found]
        if not announced:
            return asked
        self._note_backward()
        complete = self._gradients.deliver(announced, parts, made, self._replay.reducing)
        if not self._replay.reducing:
            self._gradients.fold(complete)
        elif complete:
            self._replay.reduce_due()
        return asked

    def deliver_eager(self, bucket_id: int, slot: int, gradient: torch.Tensor) -> None:
        """Takes the gradient that autograd has accumulated for a parameter, on any stream."""
        with self._receive(gradient):
            self._note_backward(accumulates=True)
            if not self._buckets[bucket_id].real[slot].requires_grad:
                return  # autograd takes its stub for one that requires gradients
            complete = self._gradients.deliver_eager(bucket_id, slot, gradient, self._replay.reducing)
            if not self._replay.reducing:
                self._gradients.fold(complete)
            elif complete:
                self._replay.reduce_due()
            self._delivered(bucket_id, slot)

    def _receive(self, gradient: torch.Tensor) -> AbstractContextManager[object]:
        """Inside, the compute stream is current and waits for the stream that was, on which `gradient` was made."""
        if self._stream is None or (current := torch.cuda.current_stream(self._device)) == self._stream:
            return nullcontext()
        self._stream.wait_stream(current)
        gradient.record_stream(self._stream)  # rare, and simpler than keeping it until it is reduced
        return torch.cuda.stream(self._stream)
