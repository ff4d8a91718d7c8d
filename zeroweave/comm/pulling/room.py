"""Multiprocessors that matmuls leave to what runs beside them."""

from __future__ import annotations

import ctypes
import os

import torch

from zeroweave.errors import EngineError


class Room:
    """Some multiprocessors of a GPU that the matmuls of a scope do not use, in the thread that opens it.

    Scopes may lie inside each other. Matmuls use no more than the program has allowed them, and behind the scope what
    it has. It holds for those of `cublasGemmEx`, as PyTorch's are unless they have an epilogue, also where they are
    captured. Raises OSError where the library is not found.
    """

    def __init__(self, device: torch.device, left: int) -> None:
        """`left`: multiprocessors that matmuls leave."""
        assert torch.version.cuda is not None
        name = f"libcublas.so.{torch.version.cuda.split('.')[0]}"
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # the one that PyTorch has, no other
        self._get, self._set = library.cublasGetSmCountTarget, library.cublasSetSmCountTarget
        self._get.argtypes = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
        self._set.argtypes = ctypes.c_void_p, ctypes.c_int
        self._target = torch.cuda.get_device_properties(device).multi_processor_count - left
        self._before: list[tuple[int, int]] = []
        """of each open scope: the thread's handle of cuBLAS, and what it was set to"""

    def begin(self) -> None:
        """A scope begins."""
        handle, before = torch.cuda.current_blas_handle(), ctypes.c_int()
        _check(self._get(handle, ctypes.byref(before)))
        _check(self._set(handle, min(before.value or self._target, self._target)))
        self._before.append((handle, before.value))

    def end(self) -> None:
        """The innermost scope is over, in the same thread."""
        _check(self._set(*self._before.pop()))


def _check(status: int) -> None:
    if status:
        raise EngineError(f"cuBLAS does not leave multiprocessors to others: its status is {status}")
