"""The kernels on a GPU if there is one, else in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if HERE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # asked for where a kernel is defined
from zeroweave._triton import masters, rules  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

ROUNDED: dict[str, Any] = {"enable_fp_fusion": False} if HERE.type == "cuda" else {}
"""For kernels that round each product and each sum, as the optimizer asks for; the interpreter does in any case."""

__all__ = ["HERE", "ROUNDED", "masters", "rules"]
