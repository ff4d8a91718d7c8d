"""Python values as JSON, and back: what optimizers, schedulers and users keep beside tensors.

None, booleans, strings, finite numbers, lists, and mappings with string keys are JSON's own. The others are a mapping
of one entry, whose key says what they are: {"~tuple": [...]}. Nothing that is read names code, so none can run.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from zeroweave.checkpoint.files import bytes_of
from zeroweave.checkpoint.manifest import DTYPES, NAMES
from zeroweave.errors import CheckpointError, EngineError

_MARK: Final = "~"
_NUMBERS: Final = (np.bool_, np.integer, np.float16, np.float32, np.float64)
"""NumPy's, of which Python has the same."""
_LARGEST: Final = 1 << 20
"""Bytes of a tensor that is no value any more, but data."""
_LEVELS: Final = 50
"""What lies deeper in each other could not be read again: each level takes up to three of JSON's, which end at 200."""


def encode(value: Any, where: str, levels: int = _LEVELS) -> Any:
    """`value` in JSON's types. EngineError, which names `where` it lies, for what cannot be written down.

    `levels`: how many more may lie inside each other.
    """
    if not levels:
        raise EngineError(f"{where} is nested too deeply, or holds itself")

    def inner(item: Any, place: str = "") -> Any:
        return encode(item, where + place, levels - 1)

    match value:
        case None | bool():
            return value
        case str() if _is_text(value):
            return value
        case int() | float() if type(value) in (int, float):
            return value if math.isfinite(value) else {"~float": repr(value)}
        case np.generic() if isinstance(value, _NUMBERS):
            return inner(value.item())
        case bytes():
            return {"~bytes": _text(value)}
        case np.ndarray() if value.dtype == np.uint32:  # of NumPy's random numbers
            return {"~uint32": inner(torch.from_numpy(value.astype(np.int64)))}
        case torch.Tensor() if value.dtype in NAMES and value.layout == torch.strided and value.nbytes <= _LARGEST:
            content = bytes_of(value.detach().cpu().contiguous().reshape(-1))
            return {"~tensor": [NAMES[value.dtype], list(value.shape), _text(content)]}
        case list():
            return [inner(item, f"[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {"~tuple": [inner(item, f"[{i}]") for i, item in enumerate(value)]}
        case set() | frozenset():
            kind = "~set" if isinstance(value, set) else "~frozenset"
            return {kind: [inner(item) for item in sorted(value, key=repr)]}
        case dict():
            pairs = [(key, inner(item, f"[{key!r}]")) for key, item in value.items()]
            if type(value) is not Counter and all(type(key) is str and key[:1] != _MARK for key, _ in pairs):
                return dict(pairs)
            kind = "~counter" if type(value) is Counter else "~dict"
            return {kind: [[inner(key), item] for key, item in pairs]}
    raise EngineError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it holds None, booleans, numbers, "
        "strings of Unicode, bytes, lists, tuples, sets, dictionaries, and tensors of at most 1 MiB"
    )


def decode(value: Any) -> Any:
    """What `encode` was given, in new objects. CheckpointError for what it never makes."""
    try:
        return _decode(value)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"a value is not what was written: {error}") from None


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in value]
        case dict():
            if len(value) == 1 and (kind := next(iter(value)))[:1] == _MARK:
                if kind not in _DECODED:
                    raise ValueError(f"it is of the unknown kind {kind!r}")
                return _DECODED[kind](value[kind])
            return {key: _decode(item) for key, item in value.items()}
    return value


def _is_text(value: str) -> bool:
    """Is it Unicode? File names that are not come with surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(content: bytes | memoryview) -> str:
    return base64.b64encode(content).decode()


def _tensor(parts: Any) -> torch.Tensor:
    name, shape, text = parts
    content, dtype = bytearray(base64.b64decode(text)), DTYPES[name]
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of the shape {shape} has {len(content)} bytes")
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _mapping(pairs: Any) -> dict[Any, Any]:
    return {_decode(key): _decode(item) for key, item in pairs}


_DECODED: Final[dict[str, Callable[[Any], Any]]] = {
    "~float": float,
    "~uint32": lambda inner: _decode(inner).numpy().astype(np.uint32),
    "~bytes": base64.b64decode,
    "~tensor": _tensor,
    "~tuple": lambda items: tuple(_decode(item) for item in items),
    "~set": lambda items: {_decode(item) for item in items},
    "~frozenset": lambda items: frozenset(_decode(item) for item in items),
    "~dict": _mapping,
    "~counter": lambda pairs: Counter(_mapping(pairs)),
}
