"""What an engine runs on, in words: for reports and logs."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist


def device_name(device: torch.device) -> str:
    """As in "cuda:0, NVIDIA H200"."""
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {platform.machine()}"


def versions() -> dict[str, str]:
    """By name, of what a result may depend on."""
    found = {"PyTorch": torch.__version__, "Python": platform.python_version()}
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        found = {"zeroweave": version("zeroweave"), **found}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
