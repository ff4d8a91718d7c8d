"""What is refused, when, and on which ranks; the engine is then as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.checkpoint.small import lying
from tests.distributed.checkpoint.runs import MODELS, Plain, batch, differing, everything, make, train
from tests.support.harness import Pool, Pools
from tests.support.marks import MODES, daily
from zeroweave.checkpoint.manifest import parse


@contextmanager
def refused(engine: zw.Engine, message: str, kind: type[Exception] = zw.CheckpointError) -> Iterator[None]:
    """Inside something is refused, on all ranks, and nothing changes."""
    before = everything(engine)
    with pytest.raises(kind, match=message) as caught:
        yield
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__
    assert differing(before, everything(engine)) == []


def misfits(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        train(engine, 1)
        engine.save(folder)
    MODELS["wide"] = lambda: Plain(width=31)
    MODELS["more"] = lambda: nn.Sequential(Plain())
    with make("wide", "adamw", 2, "eager", 1) as engine:
        shapes = r"of another shape: param/up.weight: \[29, 6\] instead of \[31, 6\], param/up.bias: \[29\] instead"
        with refused(engine, shapes):
            engine.load(folder)
        with refused(engine, "state/up.weight/exp_avg: "):
            engine.load(folder, strict=False)
        train(engine, 1)
    with make("more", "adamw", 1, "eager", 1) as engine:
        with refused(engine, "missing: param/0.down.bias, .*; unexpected: param/down.bias, .*strict=False takes"):
            engine.load(folder)
    with make("odd", "adamw", 1, "eager", 1) as engine:
        with refused(engine, r"missing: buffer/calls, buffer/nothing, param/first.bias"):
            engine.load(folder)
    with make("plain", "momentum", 3, "eager", 1) as engine:
        for strict in (True, False):
            with refused(engine, "its optimizer is AdamW, not SGD"):
                engine.load(folder, strict=strict)
    with make("plain", "groups", 3, "eager", 1) as engine:
        with refused(engine, "its optimizer is AdamW, not Adam; its optimizer has 1 groups of parameters, not 2"):
            engine.load(folder)
    model = Plain()
    with zw.initialize(model, torch.optim.AdamW(model.parameters()), {"compile": MODES["eager"]}) as engine:
        with refused(engine, "its lr_scheduler is MultiStepLR, not none"):
            engine.load(folder)
        engine.load(folder, strict=False)
        assert engine.global_steps == 1


def test_what_does_not_fit(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(misfits, tmp_path)


def _as_integers(fields: dict[str, Any]) -> None:
    fields["tensors"]["param/up.bias"]["dtype"] = "I32"


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("lr_scheduler cannot have 'step'", lambda fields: fields["values"]["lr_scheduler"]["state"].update(step=5)),
    ("cannot have 'last_epoch'", lambda fields: fields["values"]["lr_scheduler"]["state"].update(last_epoch="x")),
    ("of another kind of dtype: param/up.bias", _as_integers),
]


def hostile(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder, "one")
        place = folder / "one" / "manifest.json"
        right = parse(place.read_bytes())
        for message, change in HOSTILE:
            fields = right.model_dump(mode="json", exclude={"checksum"})
            change(fields)
            place.write_bytes(lying(right, fields))
            with refused(engine, message):
                engine.load(folder, "one")
            with refused(engine, message):
                engine.load(folder, "one", strict=False)
        place.write_bytes(right.sealed())
        with refused(engine, "the position of data cannot be taken: AttributeError"):
            engine.save(folder, "two", data=Five())
            engine.load(folder, "two", data=Five())
        engine.load(folder, "one")
        train(engine, 1)


class Five:
    def state_dict(self) -> Any:
        return 5

    def load_state_dict(self, state: Any) -> None:
        state.keys()


def test_hostile_values_under_right_checksums(pools: Pools, tmp_path: Path) -> None:
    pools(1).run(hostile, tmp_path)


class Grown(nn.Module):
    """`Plain` with something that it did not have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.new = nn.Linear(6, 29), nn.Linear(29, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.tensor(7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.new(self.down(torch.tanh(self.up(x))))


def not_strict(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder)
        saved = everything(engine)["values"]
    MODELS["grown"] = Grown
    with make("grown", "adamw", 2, "eager", 1) as engine:
        missing = "missing: buffer/count, param/new.bias, param/new.weight"
        with refused(engine, f"{missing}; group 0 of its optimizer differs in new.bias, new.weight"):
            engine.load(folder)
        train(engine, 1)
        before = everything(engine)["values"]
        engine.load(folder, strict=False)
        after = everything(engine)["values"]
        assert {name: value for name, value in before.items() if name.startswith("new.")}
        expected = {**before, **saved}
        assert differing(expected, after) == []
        assert engine.global_steps == 2
        train(engine, 1)


def test_what_is_missing_stays_where_that_is_allowed(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(not_strict, tmp_path)


class Seen(nn.Module):
    """A buffer that grows, on each rank by as much as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x[: 1 + dist.get_rank(), 0].detach()])
        return self.up(x)


MODELS["seen"] = Seen


def grown(folder: Path) -> None:
    with make("seen", "adamw", 3, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder)
        saved = everything(engine)
    with make("seen", "adamw", 1, "eager", 1) as engine:
        first, second = (rf"{name}/seen: \[\d\] instead of \[0\]" for name in ("buffer", "rank/1/buffer"))
        with refused(engine, rf"of another shape: {first} \(rank 0\); of another shape: {second} \(rank 1\)$"):
            engine.load(folder, strict=False)
        engine.module.seen = torch.zeros(2 + 2 * engine.rank)
        engine.load(folder)
        assert differing(saved, everything(engine)) == []


def on_other_ranks(folder: Path) -> None:
    with make("seen", "adamw", 1, "eager", 1) as engine:
        engine.module.seen = torch.zeros(2)
        with refused(engine, "buffers of another shape on each rank, which only 2 ranks can load: seen"):
            engine.load(folder)


def test_buffers_of_another_shape_on_each_rank(pools: Pools, tmp_path: Path) -> None:
    """The same ranks load them, once the program has made room for them."""
    pools(2).run(grown, tmp_path)
    pools(3).run(on_other_ranks, tmp_path)


def other_groups(folder: Path, change: str) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        train(engine, 1)
        groups, before = engine.optimizer.param_groups, list(engine.optimizer.param_groups[0]["params"])
        if change == "foreign":
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        else:
            groups[0]["params"].append(groups[0]["params"].pop(0))
        with pytest.raises(zw.ParameterError, match=r"groups changed.*engine\.destroy\(\)"):
            engine.save(folder)
        del groups[1:]
        groups[0]["params"][:] = before
        engine.zero_grad()
        train(engine, 1)
        engine.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000002"]


@pytest.mark.parametrize("change", ["foreign", "moved"])
def test_groups_that_have_changed_are_not_saved(pools: Pools, tmp_path: Path, change: str) -> None:
    """As `step()` refuses them: a state of other parameters would go on wrongly. Put back, all goes on."""
    pools(2).run(other_groups, tmp_path, change)


def between_windows(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0, gradient_accumulation_steps=2) as engine:
        engine.save(folder, "first")
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: engine.save(folder, "second"),
            "load": lambda: engine.load(folder),
            "export": lambda: engine.export(folder / "exported"),
        }
        loss = engine(batch(engine, 0)).square().mean()
        for call in calls.values():
            with pytest.raises(zw.EngineError, match=r"inside a forward or backward"):
                inside(engine, call)
        engine.backward(loss)
        for name, call in calls.items():
            with pytest.raises(zw.EngineError, match=rf"{name}\(\) while gradients wait: call it after the step"):
                call()
        engine.step()
        for call in calls.values():
            with pytest.raises(zw.EngineError, match="while gradients wait"):
                call()
        engine.zero_grad()
        with engine.full_parameters():
            for name, call in calls.items():
                with pytest.raises(zw.EngineError, match=rf"{name}\(\) inside `with engine.full_parameters"):
                    call()
        with engine.profiling():
            for call in calls.values():
                with pytest.raises(zw.EngineError, match="profiling"):
                    call()
        with engine.coalesce_grad_reduction():
            for call in calls.values():
                with pytest.raises(zw.EngineError, match="coalesce_grad_reduction"):
                    call()
        engine.zero_grad()
        with engine.no_sync():
            engine.backward(engine(batch(engine, 0)).square().mean())
            for call in calls.values():
                with pytest.raises(zw.EngineError, match="while gradients wait"):
                    call()
        engine.zero_grad()
        assert sorted(p.name for p in folder.iterdir()) == ["first", "latest"]
        train(engine, 1)
        engine.save(folder, "second")
    with pytest.raises(zw.EngineError, match="save on a destroyed engine"):
        engine.save(folder, "third")


def inside(engine: zw.Engine, call: Callable[[], object]) -> None:
    """In a forward of the whole model."""
    module = engine.module
    handle = module.register_forward_hook(lambda *_: call())
    try:
        engine(batch(engine, 0))
    finally:
        handle.remove()


def test_calls_inside_a_window(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(between_windows, tmp_path)


def arguments(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        for tag in ("", "../up", "latest", ".hidden"):
            with refused(engine, "cannot be a checkpoint's tag"):
                engine.save(folder, tag)
        with refused(engine, r"rank 0: client_state\['f'\] is a builtin_function_or_method"):
            engine.save(folder, "a", client_state={"f": print})
        with refused(engine, "nested too deeply, or holds itself"):
            held: dict[str, Any] = {}
            held["held"] = held
            engine.save(folder, "a", client_state=held)
        for path, tag, client, told in (
            (None, None, None, "the folder of a checkpoint is None: pass a string or a path"),
            (folder, 3, None, "the tag of a checkpoint is 3: pass a string"),
            (folder, "a", [1], "client_state is a list: pass a dictionary"),
        ):
            with pytest.raises(zw.EngineError, match=told):
                engine.save(path, tag, client)  # type: ignore[arg-type]
        assert list(folder.iterdir()) == []
        with refused(engine, "latest cannot be read: No such file"):
            engine.load(folder)
        assert engine.save(folder, "a" if engine.rank == 0 else "b", {"of": engine.rank}) == "a"
        with refused(engine, "has a checkpoint 'a' already"):
            engine.save(folder, "a")
        assert engine.load(folder, None if engine.rank == 0 else "b") == {"of": 0}
        with refused(engine, "'c' in .*manifest.json cannot be read: No such file.*by its tag: a"):
            engine.load(folder, "c")
        with refused(engine, "holds no position of data"):
            engine.load(folder, data=zw.data.GlobalBatchSampler(10, 1))


def test_arguments(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(arguments, tmp_path)


class Custom:
    """A scheduler that moves rates, and tells nothing."""

    last_epoch = 0

    def step(self) -> None: ...


def untold(folder: Path) -> None:
    model = Plain()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with zw.initialize(model, torch.optim.SGD(model.parameters()), {"compile": MODES["eager"]}) as engine:
        with refused(engine, r"rank 0: 'buffer/odd' is of torch.complex128"):
            engine.save(folder, "a")
    model = Plain()
    config = {"compile": MODES["eager"]}
    with zw.initialize(model, torch.optim.SGD(model.parameters()), config, lr_scheduler=Custom()) as engine:
        with refused(engine, "rank 0: AttributeError: 'Custom' object has no attribute 'state_dict'"):
            engine.save(folder, "a")
        train(engine, 1)
    assert list(folder.iterdir()) == []


def left_out(folder: Path) -> list[str]:
    """What a save says of what the optimizer keeps of no parameter."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters())
    with zw.initialize(model, optimizer, {"compile": MODES["eager"]}) as engine:
        train(engine, 1)
        with warnings.catch_warnings(record=True) as before:
            engine.save(folder, "a")
        optimizer.state["shared"]["steps"] = 3
        optimizer.state["table"] = torch.zeros(2)
        assert not optimizer.state["looked up"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.save(folder, "b", client_state={"shared": optimizer.state["shared"]})
        assert not before and engine.load(folder, "b") == {"shared": {"steps": 3}}
        assert optimizer.state["shared"] == {"steps": 3}, "load leaves it as it is"
    return [str(each.message) for each in caught if "leaves out" in str(each.message)]


def test_what_is_left_out_is_told(pools: Pools, tmp_path: Path) -> None:
    first, second = pools(2).run(left_out, tmp_path)
    assert len(first) == 1 and "under 'shared', 'table' of its state: hand it to save() as client_state" in first[0]
    assert second == []


def test_what_cannot_be_told(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(untold, tmp_path)


def alone(folder: Path, call: str, rank: int) -> None:
    with make("plain", "adamw", 3, "eager", 0, deadline_seconds=8.0) as engine:
        engine.save(folder)
        train(engine, 1)
        if engine.rank == rank:
            {"save": engine.save, "load": engine.load, "export": engine.export}[call](folder)
        train(engine, 1)


@daily(("call", "rank"), [("save", 0)], [("save", 1), ("load", 0), ("load", 1), ("export", 0), ("export", 1)])
def test_a_rank_that_calls_alone_is_named(
    disposable: Callable[[int], Pool], tmp_path: Path, call: str, rank: int
) -> None:
    outcomes = disposable(2).outcomes(alone, tmp_path, call, rank, deadline=100.0)
    assert all(outcome.failed for outcome in outcomes)
    said = "".join(outcome.stderr + outcome.message for outcome in outcomes)
    assert f"in {call}" in said and f"rank {rank}" in said, said
