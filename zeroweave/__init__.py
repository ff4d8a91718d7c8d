"""zeroweave: ZeRO-1, 2 and 3 for PyTorch with compiled compute and a replayed communication schedule."""

from zeroweave import data
from zeroweave.compile.frames import keep_package_from_dynamo
from zeroweave.config import Config
from zeroweave.eager.hooks import mark_forward
from zeroweave.engine import Engine
from zeroweave.engine.assembly import initialize
from zeroweave.errors import (
    AgreementError,
    CheckpointError,
    ConfigError,
    EngineError,
    NonFiniteError,
    ParameterError,
    RankFailure,
    ScheduleError,
    UnsupportedError,
    ZeroweaveError,
)
from zeroweave.experts import expert_group
from zeroweave.integrations.deepspeed import load_deepspeed
from zeroweave.integrations.pretrained import load_pretrained
from zeroweave.optim.lion import Lion
from zeroweave.optim.multi_optimizer import WholeMatrices, element_wise
from zeroweave.schedule import Schedule

__all__ = [
    "AgreementError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "EngineError",
    "Lion",
    "NonFiniteError",
    "ParameterError",
    "RankFailure",
    "Schedule",
    "ScheduleError",
    "UnsupportedError",
    "WholeMatrices",
    "ZeroweaveError",
    "data",
    "element_wise",
    "expert_group",
    "initialize",
    "load_deepspeed",
    "load_pretrained",
    "mark_forward",
]
__version__ = "0.1.0"

keep_package_from_dynamo(__name__)
