"""The kernels on a GPU if there is one, else in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if HERE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # asked for where a kernel is defined
from zeroweave._triton import masters, rules  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

__all__ = ["HERE", "masters", "rules"]
