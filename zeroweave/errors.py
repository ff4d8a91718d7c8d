"""Every error that zeroweave raises on purpose.

All derive from `ZeroweaveError`, so that one `except` catches them. Each message says what was refused,
names the parameter, key, rank or instruction, and says what to do instead. Errors of PyTorch (an invalid
shape in the model, a broken connection) are passed on as they are.

A message begins with the code of its kind of error, such as `[ZW101]`, which `zeroweave explain` explains by
`zeroweave/error_codes.md`. The text that is raised names it, or it is that of the class. A message that quotes another
one has the code of that, which is nearer to the cause.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationError

_CODE: Final = re.compile(r"\[(ZW\d{3})\] ")


class ZeroweaveError(RuntimeError):
    """The base of all errors raised by zeroweave. `code`: that of this message; of a class, that of most of its."""

    code = "ZW001"

    def __init_subclass__(cls, code: str | None = None) -> None:
        cls.code = code or cls.code

    def __init__(self, message: str = "") -> None:
        if found := _CODE.search(message):
            self.code = found[1]
        super().__init__(f"[{self.code}] {_CODE.sub('', message)}")


class ConfigError(ZeroweaveError, ValueError, code="ZW101"):
    """The config has an unknown key, a wrong value, or a combination of values that cannot work."""


class ParameterError(ZeroweaveError, code="ZW201"):
    """A parameter is used, changed or built in a way that is refused, such as reading one at rest."""


class ScheduleError(ZeroweaveError, code="ZW701"):
    """A schedule breaks a rule of the verifier; the message names the index and the instruction."""


class AgreementError(ZeroweaveError, code="ZW501"):
    """Ranks disagree about what they did in this step, or one did not arrive before the deadline."""


class RankFailure(ZeroweaveError, code="ZW503"):
    """Another rank failed; the message names the rank and the reason that it gave."""


class NonFiniteError(ZeroweaveError, code="ZW408"):
    """Gradients are infinite or NaN and `on_nonfinite` is "raise"; the message names the parameters."""


class EngineError(ZeroweaveError, code="ZW401"):
    """The engine is misused: a step without a backward, a forward on a destroyed engine, and the like."""


class CheckpointError(EngineError, code="ZW602"):
    """A checkpoint cannot be written, or is not what was written; the message names the file and what is wrong."""


class RefusedPass(ScheduleError, EngineError, code="ZW702"):
    """A pass has failed, or made a schedule illegal, where another schedule was asked for; nothing has changed."""


class UnsupportedError(ZeroweaveError, NotImplementedError, code="ZW801"):
    """Something that other libraries have, or that could be, and is not here; the message says why."""


class UnsupportedStage(ConfigError, UnsupportedError, code="ZW101"):
    """The config asks for a stage that does not shard."""


class UnsupportedOptimizer(ParameterError, UnsupportedError, code="ZW301"):
    """The optimizer's parameters cannot be reached."""


class UnsupportedWindow(EngineError, UnsupportedError, code="ZW409"):
    """The model or the optimizer decides by itself when gradients are reduced, or where they go."""


def first_problem(error: ValidationError, of: str = "") -> str:
    """The first of pydantic's findings: the dotted name of the field, `of` what, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, filter(None, (of, *first["loc"]))))
    return f"{where}: {first['msg']}" if where else first["msg"]


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
