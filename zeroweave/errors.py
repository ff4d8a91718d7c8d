"""Every error that zeroweave raises on purpose.

All derive from `ZeroweaveError`, so that one `except` catches them. Each message says what was refused,
names the parameter, key, rank or instruction, and says what to do instead. Errors of PyTorch (an invalid
shape in the model, a broken connection) are passed on as they are.
"""


class ZeroweaveError(RuntimeError):
    """The base of all errors raised by zeroweave."""


class ConfigError(ZeroweaveError, ValueError):
    """The config has an unknown key, a wrong value, or a combination of values that cannot work."""


class ParameterError(ZeroweaveError):
    """A parameter is used, changed or built in a way that is refused, such as reading one at rest."""


class ScheduleError(ZeroweaveError):
    """A schedule breaks a rule of the verifier; the message names the index and the instruction."""


class AgreementError(ZeroweaveError):
    """Ranks disagree about what they did in this step, or one did not arrive before the deadline."""


class RankFailure(ZeroweaveError):
    """Another rank failed; the message names the rank and the reason that it gave."""


class NonFiniteError(ZeroweaveError):
    """Gradients are infinite or NaN and `on_nonfinite` is "raise"; the message names the parameters."""


class EngineError(ZeroweaveError):
    """The engine is misused: a step without a backward, a forward on a destroyed engine, and the like."""


class CheckpointError(EngineError):
    """A checkpoint cannot be written, or is not what was written; the message names the file and what is wrong."""


class RefusedPass(ScheduleError, EngineError):
    """A pass has failed, or made a schedule illegal, where another schedule was asked for; nothing has changed."""


class UnsupportedError(ZeroweaveError, NotImplementedError):
    """Something that other libraries have, or that could be, and is not here; the message says why."""


class UnsupportedStage(ConfigError, UnsupportedError):
    """The config asks for a stage that does not shard."""


class UnsupportedOptimizer(ParameterError, UnsupportedError):
    """The optimizer's parameters cannot be reached."""


class UnsupportedWindow(EngineError, UnsupportedError):
    """The model or the optimizer decides by itself when gradients are reduced, or where they go."""
