"""The kernel that pulls, compiled for a GPU that need not be there. What it computes, tests/gpu tell."""

from __future__ import annotations

import ctypes
import site
from pathlib import Path

import pytest
import torch

from zeroweave.comm.pulling.kernel import DTYPES, MOST_RANKS, SOURCE, options_of

pytestmark = pytest.mark.oldest


def compiler() -> ctypes.CDLL | None:
    """NVRTC, which comes with PyTorch for CUDA, and needs no GPU."""
    folders = [Path(folder) for folder in site.getsitepackages()]
    found = [path for folder in folders for path in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*"))]
    return ctypes.CDLL(str(found[0])) if found else None


@pytest.mark.skipif(compiler() is None, reason="PyTorch brings no compiler for CUDA along")
@pytest.mark.parametrize("world", [2, 3, 4, 8, MOST_RANKS])
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_it_compiles_and_nothing_is_spilt(dtype: torch.dtype, world: int) -> None:
    nvrtc, program = compiler(), ctypes.c_void_p()
    assert nvrtc is not None
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"pull.cu", 0, None, None) == 0
    options = ["--gpu-architecture=sm_90", "-Xptxas=-v", *options_of(dtype, world - 1, world, world, 660.0)]
    texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), texts)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    told = log.value.decode()
    assert not failed, told
    assert "0 bytes spill stores, 0 bytes spill loads" in told, told
