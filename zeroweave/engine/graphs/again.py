"""A forward that was replayed, and what it takes to run it once more as ever."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroweave.engine.graphs.around import Modes
from zeroweave.engine.graphs.batch import Batch
from zeroweave.engine.graphs.capturer import Capturer
from zeroweave.engine.graphs.loop import Loop
from zeroweave.engine.graphs.parts import Outputs


class Again:
    """Made before the replay. `buffers`: those that it changes."""

    def __init__(self, given: Batch, capturer: Capturer, buffers: Sequence[torch.Tensor], modes: Modes) -> None:
        self._given, self._random, self._modes = given, capturer.random, modes
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]

    def run(self, loop: Loop, capturer: Capturer, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Runs it, on `inputs`, which the replay had: what it returns. Else all is as after the replay."""
        random, now = capturer.random, [(buffer, buffer.clone()) for buffer, _ in self._buffers]
        capturer.resume_random(self._random)
        _put(self._buffers)
        args, kwargs = self._given.of([tensor.clone() for tensor in inputs])
        try:
            with self._modes.again():
                return Outputs(loop.forward(args, kwargs))
        finally:
            _put(now)
            capturer.resume_random(random)


def _put(contents: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Tensors have these contents again. Autograd does not mind, as it does not when a normalisation counts."""
    for tensor, content in contents:
        tensor.data.copy_(content)
