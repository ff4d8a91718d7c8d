"""What an engine is assembled from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from zeroweave.comm.choose import Choice
from zeroweave.comm.wire import Wire
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
    """What lies below an engine, and what its objects share; see `initialize`."""

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
        """Has nothing been computed or reduced since the last optimizer step?"""
        computing = self.runtime.in_session or self.runtime.in_backward
        return not (computing or self.runtime.replay.record or self.stubs.gradients_pending)
