"""State dicts are what the plain model's would be: modules that change them are asked, both ways."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw

EAGER = {"compile": {"enabled": False}}


class Observed(nn.Module):
    """Keeps the range of what it has seen, in a dictionary, and a count that is refused if it is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {"range": (0.0, 0.0), "last": torch.zeros(4), "count": 0}

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.seen["range"]
        bounds = min(low, float(x.min())), max(high, float(x.max()))
        self.seen = {"range": bounds, "last": x[-1].detach().clone(), "count": self.seen["count"] + 1}
        return self.linear(x)

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["count"] < 0:
            raise ValueError("a negative count")
        self.seen = state


class Stacked(nn.Module):
    """Writes its two weights as one, scaled by a buffer, in place of both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_state_dict_post_hook(Stacked.join)
        self.register_load_state_dict_pre_hook(Stacked.split)

    def join(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        both = [state.pop(f"{prefix}{name}.weight") for name in ("query", "key")]
        state[f"{prefix}stacked"] = torch.stack(both) * state[f"{prefix}scale"]

    def split(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        query, key = state.pop(f"{prefix}stacked") / state[f"{prefix}scale"]
        state |= {f"{prefix}query.weight": query, f"{prefix}key.weight": key}

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) + self.key(x).tanh()


class Renaming(nn.Linear):
    """By methods in place of hooks."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}w"] = destination.pop(f"{prefix}weight")

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *rest)


class Twice(nn.Module):
    """One norm, and one layer, under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again, self.last = self.norm, self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.first(self.norm(x))))


KINDS: dict[str, Any] = {
    "extra state": Observed,
    "hooks": Stacked,
    "methods": lambda: Renaming(4, 4),
    "two names": Twice,
}


def made(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(KINDS[kind](), nn.Linear(4, 4))


def started(module: nn.Module, **settings: Any) -> zw.Engine:
    return zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.5), {**EAGER, **settings})


def train(call: Any) -> Tensor:
    x = torch.linspace(-1, 2, 12).view(3, 4)
    return call(x).square().mean()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"stage": 3}, {"stage": 2, "gather_after_step": True}], ids=["rests", "open"])
def test_a_plain_model_and_an_engine_exchange_them(kind: str, settings: dict[str, Any]) -> None:
    plain, module = made(kind), made(kind)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    train(plain).backward()
    optimizer.step()
    with started(module, **settings) as engine:
        engine.backward(train(engine))
        engine.step()
        found = engine.state_dict()
        assert equal(found, plain.state_dict())
        other = made(kind, seed=1)
        other.load_state_dict(found)
        with engine.full_on_rank_0() as state:
            assert equal(state, engine.module.state_dict())
        later = copy.deepcopy(found)
        engine.backward(train(engine))
        engine.step()
        assert equal(found, later) and not equal(engine.state_dict(), later), "it is nobody's but the caller's"
        engine.load_state_dict(plain.state_dict())
        assert equal(engine.state_dict(), plain.state_dict())
        assert train(engine).item() == train(plain).item()


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("extra state", {"0._extra_state": None}, "missing: 0._extra_state"),
        ("extra state", {"1.weight": torch.ones(2, 2)}, "size mismatch for 1.weight"),
        ("extra state", {"1.bias": None}, "missing: 1.bias"),
        ("extra state", {"0._extra_state": {"count": -1}}, "ValueError: a negative count"),
        ("hooks", {"0.stacked": None}, "KeyError: '0.stacked'"),
        ("hooks", {"more": torch.ones(1)}, "unknown: more"),
        ("two names", {"0.norm.running_var": None}, "missing: 0.norm.running_var"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(kind: str, change: dict[str, Any], told: str) -> None:
    with started(made(kind)) as engine:
        given = {**made(kind, seed=1).state_dict(), **change}
        if kind == "extra state" and "0._extra_state" not in change:
            given["0._extra_state"] = {"range": (0.0, 9.0), "last": torch.ones(4), "count": 3}
        before = engine.state_dict()
        with pytest.raises(zw.ParameterError, match="nothing was loaded") as refused:
            engine.load_state_dict({key: value for key, value in given.items() if value is not None})
        assert told in str(refused.value)
        engine.zero_grad()
        assert equal(engine.state_dict(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_bucket_by_bucket_says_what_it_leaves_out(kind: str, tmp_path: Path) -> None:
    with started(made(kind)) as engine, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        streamed = [name for name, _ in engine.stream_state_dict()]
        engine.export(tmp_path / "exported")
        told = [str(each.message) for each in seen]
        if kind == "two names":
            assert not told and sorted(streamed) == sorted(engine.state_dict())
        else:
            assert [each.split(" has ")[0] for each in told] == ["stream_state_dict()", "export()"]
            assert all("what 0 would add" in each for each in told)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_have_extra_state(asynchronous: bool, tmp_path: Path) -> None:
    first = made("extra state")
    with started(first) as engine:
        engine.backward(train(engine))
        engine.step()
        engine.save(tmp_path, asynchronous=asynchronous)
        saved = copy.deepcopy(first[0].seen)
        train(engine)
    again = made("extra state", seed=1)
    with started(again, stage=1) as engine:
        engine.load(tmp_path)
        assert equal(again[0].seen, saved) and saved["count"] == 1
    without = nn.Sequential(nn.Sequential(), nn.Linear(4, 4))
    without[0].linear = nn.Linear(4, 4)
    with started(without) as engine:
        with pytest.raises(zw.CheckpointError, match=r"unexpected: extra/0._extra_state"):
            engine.load(tmp_path)
        engine.load(tmp_path, strict=False)
        engine.save(tmp_path, tag="without")
    with started(made("extra state")) as engine, pytest.raises(zw.CheckpointError, match=r"missing: extra/0\._extra"):
        engine.load(tmp_path, tag="without")


def test_extra_state_that_is_no_value_is_refused_by_name(tmp_path: Path) -> None:
    module = made("extra state")
    with started(module) as engine:
        module[0].seen["count"] = object()
        with pytest.raises(
            zw.EngineError, match=r"^\[ZW\d+\] 0\._extra_state\['count'\] is a object, which a checkpoint cannot"
        ):
            engine.save(tmp_path)


def test_a_checkpoint_is_exported_with_buffers_under_each_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from zeroweave.checkpoint.export import export_checkpoint
    from zeroweave.checkpoint.folder import Folder
    from zeroweave.checkpoint.reader import Reader

    with started(made("two names")) as engine:
        engine.export(tmp_path / "engine")
        tag = engine.save(tmp_path / "saved")
    folder = Folder(tmp_path / "saved")
    with Reader(folder.manifest(tag), folder) as reader:
        export_checkpoint(reader, tmp_path / "offline", None, 1 << 30)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("engine", "offline")]
    assert "0.again.running_mean" in files[0] and equal(*({key: f[key] for key in sorted(f)} for f in files))
