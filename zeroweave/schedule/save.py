"""Schedules as files: JSON with a version. What is read is equal to what was written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetPydanticSchema, Tag, ValidationError

from zeroweave.errors import ScheduleError
from zeroweave.schedule.facts import Costs, Facts, Kind
from zeroweave.schedule.instructions import Event, Instruction

VERSION: Final = 5


def _by_kind(union: Any) -> Any:
    """A union of dataclasses that JSON distinguishes by their names, under the key "kind"."""
    kinds = tuple(Annotated[kind, Tag(kind.__name__)] for kind in get_args(union))
    kind_of = Discriminator(lambda value: value.get("kind") if isinstance(value, dict) else None)
    return Annotated[Union[kinds], kind_of]  # noqa: UP007


_ByKind: Final = GetPydanticSchema(lambda source, handler: handler(_by_kind(source)))


@dataclass(frozen=True)
class StepMarks:
    """A measured step of a schedule, in seconds from its start.

    moments: (start, stop, bytes allocated) of each instruction. collectives: (kind, bucket, issued, over) in the
    order of their issue. copies: (index, bytes, start, stop) of activations that were moved.
    """

    moments: tuple[tuple[float, float, int], ...]
    collectives: tuple[tuple[Kind, int, float, float], ...]
    copies: tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True)
class Marks:
    """What one rank measured: steps, of which the first one is shown, and what follows from them.

    costs: of all steps. seconds: of making templates and the schedule, by phase. about: what the engine told about
    itself, in a form that its writer defines.
    """

    steps: Annotated[tuple[StepMarks, ...], Field(min_length=1)]
    costs: Costs
    seconds: dict[str, float]
    about: dict[str, Any] | None


class File(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: Literal[5]
    facts: Facts
    record: tuple[Annotated[Event, _ByKind], ...]
    instructions: tuple[Annotated[Instruction, _ByKind], ...]
    measured: Marks | None = None


def write(
    path: str | os.PathLike[str],
    instructions: Iterable[Instruction],
    record: Iterable[Event],
    facts: Facts,
    measured: Marks | None = None,
) -> None:
    """Writes one schedule, each instruction and event on its own line."""
    parts = {
        "version": json.dumps(VERSION),
        "facts": json.dumps(asdict(facts), default=sorted),  # frozensets
        "record": _lines(record),
        "instructions": _lines(instructions),
    }
    if measured is not None:
        parts["measured"] = json.dumps(asdict(measured))
    Path(path).write_text("{\n" + ",\n".join(f'"{name}": {part}' for name, part in parts.items()) + "\n}\n")


def _lines(items: Iterable[Instruction] | Iterable[Event]) -> str:
    lines = [json.dumps({"kind": type(item).__name__, **asdict(item)}) for item in items]
    return "[\n" + ",\n".join(lines) + "\n]"


def read(path: str | os.PathLike[str]) -> File:
    """What a file holds; ScheduleError, naming the file and the field, if it is another file."""
    name = os.fspath(path)
    try:
        return File.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ScheduleError(f"[ZW703] {name}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("version",) and first["type"] != "missing":
            raise ScheduleError(
                f"[ZW703] {name}: version is {first['input']!r}; this zeroweave reads version {VERSION} only"
            ) from None
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ScheduleError(f"[ZW703] {name}: not a saved schedule: {field}: {first['msg']}") from None
    except ScheduleError as error:  # facts that contradict each other
        raise ScheduleError(f"[ZW703] {name}: facts: {error}") from None
