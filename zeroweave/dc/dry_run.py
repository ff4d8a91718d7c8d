"""Steps without communication, by name: played with stand-ins, so that nothing of the real ones changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from zeroweave.dc.registry import RegisteredParameter, Registry
from zeroweave.errors import EngineError


class Rehearsal(Registry):
    """The parameters and graphs of a real registry, with flats and gradient buffers of their own.

    All buffers are views of one, as large as the largest: what is written there is of no use. Nothing can be
    registered in a rehearsal.
    """

    def __init__(self, real: Registry) -> None:
        super().__init__(real._control, real._device, real._make_flat)
        scratch = _scratch(p.buffer for p in real.parameters.values())
        self.graphs = real.graphs
        self.parameters = {ds_id: self._stand_in(p, scratch) for ds_id, p in real.parameters.items()}

    def _stand_in(
        self, real: RegisteredParameter, scratch: Callable[[torch.Tensor], torch.Tensor]
    ) -> RegisteredParameter:
        return replace(
            real,
            buffer=None if real.buffer is None else scratch(real.buffer),
            flat=None if real.flat is None else self._make_flat(real.flat.layout, real.flat.shard),
        )

    def _new(self, ds_id: int, ds_shape: Sequence[int], grad_buffer: torch.Tensor | None, offset: int) -> NoReturn:
        self._refuse(f"registering parameter {ds_id}")

    def update_param_grad_buffer(self, ds_id: int, grad_buffer: torch.Tensor) -> NoReturn:
        self._refuse(f"another buffer for parameter {ds_id}")

    def register_graph(self, graph_id: int, *_: object, **__: object) -> NoReturn:
        self._refuse(f"registering graph {graph_id}")

    def _refuse(self, what: str) -> NoReturn:
        raise EngineError(f"{what} while profiling: call enable_profiling(False) first")


def _scratch(buffers: Iterable[torch.Tensor | None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from one of the buffers to a tensor of its shape and dtype; all lie in the same memory."""
    real = [buffer for buffer in buffers if buffer is not None]
    if not real:
        return lambda buffer: buffer
    memory = torch.zeros(max(b.nbytes for b in real), dtype=torch.uint8, device=real[0].device)
    return lambda buffer: memory[: buffer.nbytes].view(buffer.dtype).view(buffer.shape)
