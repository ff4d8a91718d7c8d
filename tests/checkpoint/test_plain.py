"""Python values as JSON, and back."""

from __future__ import annotations

import datetime
import enum
import json
import random
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from zeroweave.checkpoint.manifest import Manifest, parse
from zeroweave.checkpoint.plain import Stored, decode, encode
from zeroweave.errors import CheckpointError, EngineError


def there_and_back(value: Any) -> Any:
    """By way of a manifest."""
    encoded = encode(value, "it")
    manifest = Manifest(tag="a", step=0, world=1, stage=1, files={}, tensors={}, values={"it": encoded})
    return decode(parse(manifest.sealed()).values["it"])


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {1: value}
    return value


SAME = [
    None,
    True,
    0,
    -(2**63),
    2**200,
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    float("inf"),
    float("-inf"),
    "",
    "é\0\u2028😀",
    b"",
    b"\xff\0",
    [],
    [1, [2.0, [None]]],
    (),
    (1, ("a", [()])),
    set(),
    {1, "a", (2, 3)},
    frozenset({1}),
    {frozenset({1, 2}), frozenset()},
    {},
    {"a": 1, "": [2]},
    {1: "a", (2, 3): "b", None: "c", frozenset({4}): "d"},
    {"~tuple": [1]},
    {"~": 1, "a": 2},
    {"~dict": {"~set": []}},
    Counter({3: 2, 1: 1}),
    Counter(),
    random.Random(1).getstate(),
    np.random.default_rng(3).bit_generator.state,
    deep(49),
]


@pytest.mark.parametrize("value", SAME, ids=map(str, range(len(SAME))))
def test_a_value_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)
    if isinstance(value, float):
        assert repr(found) == repr(value)


def test_not_a_number_comes_back() -> None:
    assert np.isnan(there_and_back(float("nan")))


def test_the_order_of_a_dictionary_comes_back() -> None:
    assert list(there_and_back({"b": 1, "a": 2})) == ["b", "a"]
    assert list(there_and_back({2: 1, 1: 2})) == [2, 1]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.tensor([]),
        torch.empty(0, 3),
        torch.arange(6).view(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([1.0]).to(torch.float8_e4m3fn),
        torch.tensor([1, 65535], dtype=torch.uint16),
        torch.get_rng_state(),
    ],
    ids=lambda value: f"{value.dtype} {list(value.shape)}",
)
def test_a_tensor_comes_back_bit_by_bit(value: torch.Tensor) -> None:
    (found,) = there_and_back((value,))
    assert found.dtype == value.dtype and found.shape == value.shape
    a, b = found.contiguous().reshape(-1), value.contiguous().reshape(-1)
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    found.zero_()  # it has memory of its own


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float64, np.int8, np.uint16, np.uint32, np.int64, np.bool_, np.complex64]
)
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_an_array_comes_back(dtype: Any, shape: tuple[int, ...]) -> None:
    given = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    for value in (given, given.T, given[::-1] if shape else given, np.broadcast_to(given, (2, *shape))):
        found = there_and_back(value)
        assert found.dtype == value.dtype and found.shape == value.shape and (found == value).all()
        found.fill(0)  # it has memory of its own


def test_large_tensors_lie_beside_the_values() -> None:
    stored = Stored("mine")
    large, many = torch.arange(2.0**19), np.arange(2048)
    given = {"a": [(large, 1)], 2: {"b": large.view(2, -1).T, "c": many}, "small": torch.ones(3)}
    encoded = encode(given, "it", stored)
    assert [*stored.tensors] == ["mine/0", "mine/1", "mine/2"] and len(json.dumps(encoded)) < 400
    found = decode(json.loads(json.dumps(encoded)), stored.tensors.__getitem__)
    assert torch.equal(found["a"][0][0], large) and found["a"][0][1] == 1
    assert torch.equal(found[2]["b"], given[2]["b"]) and (found[2]["c"] == many).all()
    assert torch.equal(found["small"], torch.ones(3))
    for take in (None, {}.__getitem__):
        with pytest.raises(CheckpointError, match="not what was written"):
            decode(encoded, take)


def test_what_a_tensor_shows_is_what_is_written() -> None:
    value = torch.complex(torch.arange(1024.0), torch.ones(1024)).conj()
    stored = Stored("mine")
    for found in (there_and_back(value[:3]), decode(encode(value, "it", stored), stored.tensors.__getitem__)):
        assert torch.equal(found, value[: len(found)]) and not found.is_conj()


def test_numpys_numbers_become_pythons() -> None:
    given = [np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True), np.str_("a"), np.float64("inf")]
    assert there_and_back(given) == [float(np.float32(0.1)), 0.1, -3, True, "a", float("inf")]


def test_numpys_random_numbers_go_on() -> None:
    generator = np.random.RandomState(5)
    generator.standard_normal()
    state = there_and_back(generator.get_state(legacy=True))
    expected = generator.standard_normal(3)
    generator.set_state(state)
    assert (generator.standard_normal(3) == expected).all()


def test_subclasses_become_what_they_are_of() -> None:
    pair = namedtuple("pair", "a b")
    assert there_and_back([OrderedDict(a=1), pair(1, 2), torch.Size([3])]) == [{"a": 1}, (1, 2), (3,)]


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_lr_schedulers_go_on(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2)]
    first, second = map(make, optimizers)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.step()
        scheduler.step()

    for _ in range(3):
        step(optimizers[0], first)
    second.load_state_dict(there_and_back(first.state_dict()))
    for key, value in optimizers[0].param_groups[0].items():
        if key != "params":
            optimizers[1].param_groups[0][key] = there_and_back(value)
    for _ in range(4):
        step(optimizers[0], first)
        step(optimizers[1], second)
    assert first.get_last_lr() == second.get_last_lr()


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), "it is a object"),
        ({"a": [1, (2, print)]}, r"it\['a'\]\[1\]\[1\] is a builtin"),
        ({1: {"b": 1j}}, r"it\[1\]\['b'\] is a complex"),
        ([Color.RED], r"it\[0\] is a Color"),
        ([datetime.date(2000, 1, 1)], r"it\[0\] is a date"),
        ({"a": torch.zeros(1 << 18 | 1)}, r"it\['a'\] is a Tensor"),
        ([torch.eye(2).to_sparse()], r"it\[0\] is a Tensor"),
        ([torch.empty(2, device="meta")], r"it\[0\] is a Tensor"),
        ([np.array([print])], r"it\[0\] is a ndarray"),
        ([np.zeros(2, dtype=">f4")], r"it\[0\] is a ndarray"),
        ([np.zeros(2, dtype=complex)], r"it\[0\] is a ndarray"),
        ([np.ma.masked_array([1, 2], [0, 1])], r"it\[0\] is a MaskedArray"),
        ([np.ma.masked_array([1, 2], [0, 1], dtype=np.uint32)], r"it\[0\] is a MaskedArray"),
        ([np.longdouble(1)], r"it\[0\] is a longdouble"),
        (["a\ud800"], r"it\[0\] is a str"),
        ({"a": deep(50)}, "nested too deeply"),
        ({print: 1}, "it is a builtin"),
    ],
)
def test_a_refusal_names_the_place(value: Any, place: str) -> None:
    with pytest.raises(EngineError, match=place):
        encode(value, "it")


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(EngineError, match="holds itself"):
        encode(value, "it")


@pytest.mark.parametrize(
    "text",
    [
        '{"~what": 1}',
        '{"~tuple": 1}',
        '{"~float": []}',
        '{"~float": "x"}',
        '{"~bytes": 3}',
        '{"~bytes": "a"}',
        '{"~set": [[]]}',
        '{"~frozenset": [{}]}',
        '{"~dict": [[1]]}',
        '{"~dict": [[[], 1]]}',
        '{"~counter": {"a": 1}}',
        '{"~uint32": "x"}',
        '{"~stored": "param/w"}',
        '{"~array": [1]}',
        '{"~tensor": 1}',
        '{"~tensor": ["F32", [1], ""]}',
        '{"~tensor": ["F99", [0], ""]}',
        '{"~tensor": ["F32", [-1, -1], "AAAAAA=="]}',
        '{"~tensor": ["F32", [1152921504606846976], "AAAAAA=="]}',
        '{"~tensor": ["F32", ["a"], "AAAAAA=="]}',
        '{"~tensor": ["F32", [1.0], "AAAAAA=="]}',
        '{"~tensor": ["F32", [0, 1e300], ""]}',
        '[{"a": {"~pickle": "gASVAAAAAAAAAA=="}}]',
    ],
)
def test_what_was_never_written_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="not what was written"):
        decode(json.loads(text))
