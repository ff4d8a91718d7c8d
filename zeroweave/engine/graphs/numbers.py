"""Random numbers that the host draws beside PyTorch's: those of Python's `random`, and NumPy's global ones."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Final

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
            sys.modules["numpy"].random.set_state(pickle.loads(self._numpy))


def _numpy_state() -> bytes | None:
    """In bytes, which can be compared; of whatever generator the program has given NumPy."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
