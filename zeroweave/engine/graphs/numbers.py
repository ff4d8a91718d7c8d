"""Random numbers that the host draws beside PyTorch's: those of Python's `random`, and NumPy's global ones."""

from __future__ import annotations

import random
import sys
from typing import Any, Final

DRAWS: Final = "the model, or its loss, draws random numbers on the CPU, which a graph would repeat"
"""Why what does cannot be captured."""


class HostNumbers:
    """Where these generators are now. NumPy's counts if the program has imported it."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    @property
    def drawn(self) -> bool:
        """Were any since?"""
        return random.getstate() != self._python or _numpy_state() != self._numpy

    def restore(self) -> None:
        """They come again as they would have from here on."""
        random.setstate(self._python)
        if self._numpy is not None:
            kind, key, *rest = self._numpy
            sys.modules["numpy"].random.set_state((kind, list(key), *rest))


def _numpy_state() -> tuple[Any, ...] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, key, *rest = numpy.random.get_state()
    return kind, tuple(key.tolist()), *rest
