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
from zeroweave.errors import EngineError

_MARK: Final = "~"
_LARGEST: Final = 1 << 20
"""Bytes of a tensor that is no value any more, but data."""


def encode(value: Any, where: str) -> Any:
    """`value` in JSON's types. EngineError, which names `where` it lies, for what cannot be written down."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value if math.isfinite(value) else {"~float": repr(value)}
        case np.generic():
            return encode(value.item(), where)
        case bytes():
            return {"~bytes": _text(value)}
        case np.ndarray() if value.dtype == np.uint32:  # of NumPy's random numbers
            return {"~uint32": encode(torch.from_numpy(value.astype(np.int64)), where)}
        case torch.Tensor() if value.dtype in NAMES and value.layout == torch.strided and value.nbytes <= _LARGEST:
            content = bytes_of(value.detach().cpu().contiguous().reshape(-1))
            return {"~tensor": [NAMES[value.dtype], list(value.shape), _text(content)]}
        case list():
            return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {"~tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        case set() | frozenset():
            return {"~set": [encode(item, where) for item in sorted(value, key=repr)]}
        case dict():
            pairs = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
            if type(value) is not Counter and all(type(key) is str and key[:1] != _MARK for key, _ in pairs):
                return dict(pairs)
            kind = "~counter" if type(value) is Counter else "~dict"
            return {kind: [[encode(key, where), item] for key, item in pairs]}
    raise EngineError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it holds None, booleans, numbers, "
        "strings, bytes, lists, tuples, sets, dictionaries, and small tensors"
    )


def decode(value: Any) -> Any:
    """What `encode` was given, in new objects. ValueError for what it never makes."""
    match value:
        case list():
            return [decode(item) for item in value]
        case dict():
            if len(value) == 1 and (kind := next(iter(value)))[:1] == _MARK:
                if kind not in _DECODED:
                    raise ValueError(f"a value is of the unknown kind {kind!r}")
                return _DECODED[kind](value[kind])
            return {key: decode(item) for key, item in value.items()}
    return value


def _text(content: bytes | memoryview) -> str:
    return base64.b64encode(content).decode()


def _tensor(parts: Any) -> torch.Tensor:
    name, shape, text = parts
    content, dtype = bytearray(base64.b64decode(text)), DTYPES[name]
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of the shape {shape} has {len(content)} bytes")
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _mapping(pairs: Any) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in pairs}


_DECODED: Final[dict[str, Callable[[Any], Any]]] = {
    "~float": float,
    "~uint32": lambda inner: decode(inner).numpy().astype(np.uint32),
    "~bytes": base64.b64decode,
    "~tensor": _tensor,
    "~tuple": lambda items: tuple(decode(item) for item in items),
    "~set": lambda items: {decode(item) for item in items},
    "~dict": _mapping,
    "~counter": lambda pairs: Counter(_mapping(pairs)),
}
