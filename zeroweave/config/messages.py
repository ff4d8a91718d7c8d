"""pydantic's findings about a config, as sentences that name the key and say what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The only problem in one line, or a list of all problems."""
    lines = findings(error, model)
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} errors in the config:", *(f"- {line}" for line in lines)])


def findings(error: ValidationError, model: type[BaseModel], table: str = "") -> list[str]:
    """One line for each problem. `table`: the dotted name of the table that `model` describes; "": the whole config."""
    known = _known_keys(model, table and f"{table}.")
    found: dict[str, list[ErrorDetails]] = {}
    for details in error.errors():
        found.setdefault(_key_of((*filter(None, [table]), *details["loc"]), known), []).append(details)
    return [finding(key, details, known) for key, details in found.items()]


def finding(key: str, details: list[ErrorDetails], known: tuple[str, ...] = ()) -> str:
    """What is wrong with a key. pydantic has one error for each branch of a union; the first has the whole value."""
    first = details[0]
    if first["type"] == "extra_forbidden":
        return f"[ZW102] unknown key {key!r} in the config; {_suggestion(key, known)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if not first["msg"].startswith("Input should be "):
        return f"{key} is {first['input']!r}: {first['msg']}"
    allowed = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in details)
    return f"{key} must be {' or '.join(allowed)}, not {first['input']!r}"


def _key_of(location: tuple[int | str, ...], known: tuple[str, ...]) -> str:
    """The dotted key of a pydantic location, without list indices and branches of unions below a leaf."""
    key = ""
    for part in location:
        if key in known and not any(name.startswith(f"{key}.") for name in known):
            break
        key = f"{key}.{part}" if key else str(part)
    return key


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key that was probably meant: of that last part, the nearest of its table, or of all."""
    table, _, leaf = key.rpartition(".")
    anywhere: dict[str, str] = {}
    for name in known:
        anywhere.setdefault(name.rpartition(".")[2], name)
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == table}
    for names in ({leaf: anywhere[leaf]} if leaf in anywhere else {}, siblings, anywhere):
        for near in difflib.get_close_matches(leaf, names, n=1):
            return names[near]
    return None


def _suggestion(key: str, known: tuple[str, ...]) -> str:
    """The key that was probably meant, or all keys of the table."""
    if (near := nearest(key, known)) is not None:
        return f"did you mean {near!r}?"
    table = key.rpartition(".")[0]
    siblings = sorted(name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == table)
    return f"the keys {f'of {table!r} ' if table else ''}are {', '.join(siblings)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """All dotted keys, tables included: "stage", "precision", "precision.params", …"""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(_known_keys(field.annotation, f"{prefix}{name}."))
    return tuple(keys)
