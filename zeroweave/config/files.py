"""The files that configs are read from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeroweave.errors import ConfigError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """ConfigErrors inside name the file."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def read(path: Path) -> Mapping[str, Any]:
    """The table of keys in a .json or .toml file. ConfigError where it cannot be read, or holds none."""
    parsers = {".json": json.loads, ".toml": tomllib.loads}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ConfigError("the config file must end in .json or .toml")
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}") from None
    except ValueError as error:  # malformed JSON, TOML or UTF-8
        raise ConfigError(f"the config file is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the config file must hold a table of keys, not a {type(values).__name__}")
    return values
