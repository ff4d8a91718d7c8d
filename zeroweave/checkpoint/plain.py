"""Python values as JSON, and back: what optimizers, schedulers and users keep besides tensors.

None, booleans, strings, finite numbers, lists, and mappings with string keys are JSON's own. The others are a mapping
of one entry, whose key says what they are: {"~tuple": [...]}. Nothing that is read names code, so none can run.

A tensor above `_SMALL` is {"~stored": NAME} where the writer has a place for it among the checkpoint's tensors.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from zeroweave.checkpoint.files import bytes_of
from zeroweave.checkpoint.manifest import DTYPES, NAMES
from zeroweave.errors import CheckpointError, EngineError

_Take: TypeAlias = Callable[[str], torch.Tensor] | None
_MARK: Final = "~"
_NUMBERS: Final = (np.bool_, np.integer, np.float16, np.float32, np.float64)
"""NumPy's, of which Python has the same."""
_LARGEST: Final = 1 << 20
"""Bytes of a tensor that is no value any more, but data."""
_SMALL: Final = 1 << 12
"""Bytes of a tensor that is kept in the manifest, which all ranks read, although it could be among the tensors."""
_LEVELS: Final = 50
"""What is nested deeper could not be read again: each level takes up to three of JSON's, which end at 200."""


class Stored:
    """The large tensors of one value, which a checkpoint has among its tensors, under names that begin with `kind`."""

    def __init__(self, kind: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """by name, on their own devices"""
        self._kind = kind

    def add(self, tensor: torch.Tensor) -> str:
        """The name of one more."""
        name = f"{self._kind}/{len(self.tensors)}"
        self.tensors[name] = tensor.detach().resolve_conj().resolve_neg()  # the bytes are what it holds
        return name


def encode(value: Any, where: str, stored: Stored | None = None, levels: int = _LEVELS) -> Any:
    """`value` in JSON's types. EngineError, which names `where` it is, for what cannot be written down.

    `stored`: gets the tensors that are too large; None: they cannot be written down. `levels`: how many more may be
    nested.
    """
    if not levels:
        raise EngineError(f"[ZW606] {where} is nested too deeply, or holds itself")

    def inner(item: Any, place: str = "") -> Any:
        return encode(item, where + place, stored, levels - 1)

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
        case np.ndarray() if type(value) is np.ndarray and value.dtype == np.uint32:  # of NumPy's random numbers
            return {"~uint32": inner(torch.from_numpy(value.astype(np.int64)))}
        case torch.Tensor() if is_dense(value) and value.nbytes <= (_LARGEST if stored is None else _SMALL):
            here = value.detach().cpu().resolve_conj().resolve_neg()
            return {"~tensor": [NAMES[value.dtype], list(value.shape), _text(bytes_of(here.contiguous().reshape(-1)))]}
        case torch.Tensor() if is_dense(value) and stored is not None:
            return {"~stored": stored.add(value)}
        case np.ndarray() if (tensor := _as_tensor(value)) is not None:
            return {"~array": inner(tensor)}
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
    size = " of at most 1 MiB" if stored is None else ""
    raise EngineError(
        f"[ZW606] {where} is a {type(value).__name__}, which a checkpoint cannot hold here: it holds None, booleans, "
        f"numbers, strings of Unicode, bytes, lists, tuples, sets, dictionaries, and dense tensors and arrays{size}"
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """True if it is strided, has values, and its dtype has a name."""
    return tensor.dtype in NAMES and tensor.layout == torch.strided and not tensor.is_meta


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor of what an array holds, without a copy where it can be; None where PyTorch has nothing like it."""
    if isinstance(array, np.ma.MaskedArray):  # it would lose its mask
        return None
    try:
        found = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except (TypeError, ValueError):  # its dtype, or the order of its bytes
        return None
    return found if found.dtype in NAMES else None


def decode(value: Any, take: Callable[[str], torch.Tensor] | None = None) -> Any:
    """What `encode` was given, in new objects. CheckpointError for what it never makes.

    `take`: gives the tensors that `encode` had `stored`, by name, and raises LookupError for others; None: has none.
    """
    try:
        return _decode(value, take)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"a value is not what was written: {error}") from None


def _decode(value: Any, take: _Take) -> Any:
    match value:
        case list():
            return [_decode(item, take) for item in value]
        case dict():
            if len(value) == 1 and (kind := next(iter(value)))[:1] == _MARK:
                if kind not in _DECODED:
                    raise ValueError(f"it is of the unknown kind {kind!r}")
                return _DECODED[kind](value[kind], take)
            return {key: _decode(item, take) for key, item in value.items()}
    return value


def _is_text(value: str) -> bool:
    """True for Unicode. File names that are none come with surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(content: bytes | memoryview) -> str:
    return base64.b64encode(content).decode()


def _stored(name: Any, take: _Take) -> torch.Tensor:
    if take is None:
        raise ValueError("it has no tensors beside it")
    return take(name)


def _tensor(parts: Any) -> torch.Tensor:
    name, shape, text = parts
    content, dtype = bytearray(base64.b64decode(text)), DTYPES[name]
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of the shape {shape} has {len(content)} bytes")
    return torch.frombuffer(content or bytearray(16), dtype=dtype)[: math.prod(shape)].view(shape)


def _array(inner: Any, take: _Take) -> np.ndarray[Any, Any]:
    found = _decode(inner, take)
    if not isinstance(found, torch.Tensor):
        raise ValueError("an array holds no tensor")
    return found.numpy()


def _mapping(pairs: Any, take: _Take) -> dict[Any, Any]:
    return {_decode(key, take): _decode(item, take) for key, item in pairs}


_DECODED: Final[dict[str, Callable[[Any, _Take], Any]]] = {
    "~float": lambda text, _: float(text),
    "~uint32": lambda inner, take: _array(inner, take).astype(np.uint32),
    "~bytes": lambda text, _: base64.b64decode(text),
    "~tensor": lambda parts, _: _tensor(parts),
    "~stored": _stored,
    "~array": _array,
    "~tuple": lambda items, take: tuple(_decode(item, take) for item in items),
    "~set": lambda items, take: {_decode(item, take) for item in items},
    "~frozenset": lambda items, take: frozenset(_decode(item, take) for item in items),
    "~dict": _mapping,
    "~counter": lambda pairs, take: Counter(_mapping(pairs, take)),
}
