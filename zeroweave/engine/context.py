"""What an engine is assembled from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroweave.comm.copy_engine import Choice
from zeroweave.comm.wrappers import Wire
from zeroweave.config import Config
from zeroweave.engine.agreements import Agreements
from zeroweave.engine.guard import Guard, Progress
from zeroweave.notices import Journal
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.parameters.module_parameters import ModuleParameters
from zeroweave.parameters.stub import StubStatus
from zeroweave.ranks.control import Control
from zeroweave.runtime.runtime import Runtime


@dataclass(frozen=True)
class EngineContext:
    """What is below an engine, and what its objects share; see `initialize`."""

    model: nn.Module
    config: Config
    runtime: Runtime
    transport: Wire
    control: Control
    progress: Progress
    guard: Guard
    agreements: Agreements
    journal: Journal
    module_parameters: ModuleParameters
    stubs: StubStatus
    optimizer: ShardedOptimizer | None
    original_dtypes: Mapping[str, torch.dtype]
    device: torch.device
    gathers: Choice
    """which way they take, and why"""
    ends: ExitStack
    """ends what was started for the engine: its communicators, last the control group"""

    @property
    def between_windows(self) -> bool:
        """True if nothing has been computed or reduced since the last optimizer step."""
        computing = self.runtime.in_session or self.runtime.in_backward
        return not (computing or self.runtime.replay.record or self.stubs.gradients_pending)

    @property
    def described(self) -> dict[str, Any]:
        """What is trained and on what, for logs and reports: the model's class, ranks, device, versions and config."""
        cuda = self.device.type == "cuda"
        machine = torch.cuda.get_device_name(self.device) if cuda else platform.machine()
        return {
            "model": type(self.model).__name__,
            "world": self.control.world,
            "device": f"{self.device}, {machine}",
            "versions": _versions(),
            "config": self.config.model_dump(mode="json"),
        }


def _versions() -> dict[str, str]:
    """By name, of what a result may depend on."""
    found = {"PyTorch": torch.__version__, "Python": platform.python_version()}
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        found = {"zeroweave": version("zeroweave"), **found}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
