"""Reads the files of configs: JSON and TOML."""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from zeroweave.errors import ConfigError


@contextmanager
def opened(source: Mapping[Any, Any] | str | os.PathLike[str]) -> Iterator[Mapping[Any, Any]]:
    """The table of keys that `source` is, or that it names. A ConfigError inside gets the file's name in front."""
    if isinstance(source, Mapping):
        yield source
        return
    path = Path(source)
    try:
        yield _read(path)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _read(path: Path) -> Mapping[str, Any]:
    """The table of keys in a .json or .toml file. ConfigError where it cannot be read, or holds none."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError("[ZW104] the config file must end in .json or .toml")
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"[ZW104] the config file cannot be read: {error.strerror}") from None
    except ValueError as error:  # malformed JSON, TOML or UTF-8
        raise ConfigError(f"[ZW104] the config file is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"[ZW104] the config file must hold a table of keys, not a {type(values).__name__}")
    return values


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON. Python's parser takes the last of two equal keys silently; TOML's refuses them."""
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"[ZW104] more than one {' and '.join(map(repr, twice))} in one table: keep one")
    return table


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    ".json": partial(json.loads, object_pairs_hook=_once),
    ".toml": tomllib.loads,
}
