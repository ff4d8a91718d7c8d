"""Groups of ranks change where parameters lie, and no number: every feature gives the bits that one group gives.

Gradients are whole numbers here, so that their sums have no rounding, and the order of sums is no difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroweave as zw
from tests.support.counting import counted
from tests.support.harness import Pools
from zeroweave.errors import ConfigError, EngineError

WORLD, MICRO, STEPS = 4, 2, 4
Group = int | str | None
"""The size of groups; with a "c" behind it, each group has all optimizer states; None: all ranks are one group."""


def sharding(group: Group) -> dict[str, Any]:
    if isinstance(group, str):
        return {"group_size": int(group.removesuffix("c")), "states": "group"}
    return {"group_size": group}


class Whole(nn.Module):
    """Its gradients are sums of its inputs, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 20) for _ in range(3))
        self.out = nn.Linear(24, 36, bias=False)
        self.out.requires_grad_(False)
        self.head = nn.Linear(24, 36)

    def forward(self, x: Tensor) -> Tensor:
        total = sum((layer(x).float().sum() for layer in self.layers), x.new_zeros((), dtype=torch.float32))
        return total + self.head(x).float().sum() + self.out(x).float().sum()


def batch(step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(-4, 5, (2, 24), generator=generator).to(dtype)


def engine_of(group: Group, optimizer: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = Whole()
    make = {
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
        "muon": lambda ps: [
            torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.02),
            torch.optim.AdamW([p for p in ps if p.dim() != 2], lr=0.01),
        ],
    }[optimizer]
    base = {
        "stage": 3,
        "gradient_accumulation_steps": MICRO,
        "compile": {"enabled": False},
        "sharding": sharding(group),
        "bucket": {"bytes": 4096},
        "deadline_seconds": 200,
    }
    return zw.initialize(model, make([p for p in model.parameters() if p.requires_grad]), {**base, **config})


def train(engine: Any, steps: range, way: str = "plain") -> list[float]:
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        if way == "coalesced":
            with engine.coalesce_grad_reduction():
                for micro in range(MICRO):
                    engine.backward(engine(batch(step, micro, engine.rank, dtype)) / MICRO)
            engine.step()
            continue
        for micro in range(MICRO):
            loss = engine(batch(step, micro, engine.rank, dtype))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            if way == "reads" and micro == 0:
                engine.gradients()
            engine.step()
        if way == "between":
            with torch.no_grad():
                losses.append(float(engine(batch(step, 9, engine.rank, dtype))))
            with engine.full_parameters(), torch.no_grad():
                engine.module.head.bias.add_(0.25)
            with engine.profiling():
                train(engine, range(1))
    return losses


def run(group: Group, optimizer: str, config: dict[str, Any], way: str) -> tuple[Any, ...]:
    with engine_of(group, optimizer, config) as engine:
        losses = train(engine, range(STEPS), way)
        full = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
        return losses, full, engine.state_dict(), engine.get_global_grad_norm()


def differing(mine: Any, theirs: Any) -> list[str]:
    wrong = [] if mine[0] == theirs[0] and mine[3] == theirs[3] else [f"losses or norms {mine[0]} {theirs[0]}"]
    for a, b in zip(mine[1:3], theirs[1:3], strict=True):
        wrong += [name for name in a if not torch.equal(a[name], b[name])]
    return wrong


def compare(optimizer: str, config: dict[str, Any], way: str) -> list[str]:
    expected = run(None, optimizer, config, way)
    torch.manual_seed(3)
    start = dict(Whole().named_parameters())
    assert any(not torch.equal(value, start[name]) for name, value in expected[1].items())
    found = ((group, differing(run(group, optimizer, config, way), expected)) for group in (2, 1, "2c", "1c"))
    return [f"groups of {group}: {each}" for group, wrong in found for each in wrong]


BF16 = {"precision": {"params": "bfloat16"}}
SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "plain": ("adamw", {}, "plain"),
    "stage1": ("adamw", {"stage": 1}, "plain"),
    "stage2_coalesced": ("adamw", {"stage": 2}, "coalesced"),
    "clipped": ("adamw", {"gradient_clipping": 1.0}, "plain"),
    "bf16": ("adamw", BF16, "plain"),
    "bf16_stage2": ("adamw", {**BF16, "stage": 2}, "plain"),
    "compact": ("adamw", {"precision": {"params": "bfloat16", "optimizer": "compact"}}, "plain"),
    "compact_offloaded": (
        "adamw",
        {"precision": {"params": "bfloat16", "optimizer": "compact"}, "offload": {"optimizer": "all"}},
        "plain",
    ),
    "fp16": ("adamw", {"precision": {"params": "float16", "loss_scale": 2.0}, "reduce": {"op": "predivide"}}, "plain"),
    "offloaded": ("adamw", {**BF16, "offload": {"optimizer": "all", "params": True}}, "plain"),
    "muon": ("muon", {}, "plain"),
    "reads": ("adamw", {}, "reads"),
    "between": ("adamw", {}, "between"),
    "stage1_between": ("adamw", {"stage": 1, "gather_after_step": True}, "between"),
    "compiled": ("adamw", {"compile": {"lower": "aot_eager"}}, "plain"),
}
DAILY = ("clipped", "bf16_stage2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.matrix) for name in SETTINGS]
)
def test_groups_change_no_number(name: str, pools: Pools) -> None:
    for wrong in pools(WORLD).run(compare, *SETTINGS[name]):
        assert wrong == []


def save(folder: Path, group: Group) -> tuple[Any, ...]:
    with engine_of(group, "adamw", BF16) as engine:
        train(engine, range(2))
        engine.save(folder)
        train(engine, range(2, STEPS))
        return ({name: engine.full(name) for name, _ in engine.module.named_parameters()},)


def load(folder: Path, group: Group) -> tuple[Any, ...]:
    with engine_of(group, "adamw", {**BF16, "stage": 2}) as engine:
        engine.load(folder)
        train(engine, range(2, STEPS))
        return ({name: engine.full(name) for name, _ in engine.module.named_parameters()},)


@pytest.mark.matrix
@pytest.mark.parametrize(("of", "to"), [(2, None), (None, 2), (2, 1), (1, 2), ("2c", None), (1, "2c"), ("1c", 2)])
def test_checkpoints_load_with_other_groups(of: Group, to: Group, pools: Pools, tmp_path: Path) -> None:
    saved, loaded = pools(WORLD).run(save, tmp_path, of), pools(WORLD).run(load, tmp_path, to)
    for (before,), (after,) in zip(saved, loaded, strict=True):
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


def traffic(group_size: int) -> None:
    """By the ledger, by PyTorch's profiler, and by the formula."""
    with engine_of(group_size, "adamw", {}) as engine:
        train(engine, range(2))
        with counted() as found:
            train(engine, range(1))
        replicas, stats = WORLD // group_size, engine.stats.last_step
        assert engine.schedule is not None
        numel = {each.id: each.nbytes // 4 for each in engine.schedule.facts.buckets}
        trained = [numel[each.id] for each in engine.schedule.facts.buckets if each.trainable]
        across = [each // group_size for each in trained]
        for kind in ("all_gather", "reduce_scatter"):
            inside = [numel[bucket] for what, bucket in engine.schedule.collectives() if what == kind]
            assert kind == "all_gather" or sorted(inside) == sorted(MICRO * trained)
            assert sorted(each for what, each in found if what == kind) == sorted(inside + across)
            there = stats[f"{kind} across"]
            assert (there.calls, there.payload) == (len(trained), 4 * sum(across))
            assert there.wire == sum(4 * each * (replicas - 1) // replicas for each in across)
        sent = sum(stats[f"{kind} across"].wire for kind in ("all_gather", "reduce_scatter"))
        assert sent <= 2 * 4 * sum(trained) / group_size


def test_what_crosses_groups_is_sent_once_a_step(pools: Pools) -> None:
    pools(WORLD).run(traffic, 2)


def copied_traffic() -> None:
    with engine_of("2c", "adamw", {}) as engine:
        train(engine, range(2))
        assert engine.schedule is not None
        trained = [each.nbytes // 2 for each in engine.schedule.facts.buckets if each.trainable]
        there = engine.stats.last_step["all_reduce across"]
        assert (there.calls, there.payload, there.wire) == (len(trained), sum(trained), sum(trained))
        assert not {"all_gather across", "reduce_scatter across"} & engine.stats.total.keys()
        held = engine.stats.memory
        assert held.gradients == sum(trained) and 0.9 < held.optimizer / sum(trained) / 2 <= 1.1, held


def test_groups_with_all_states_send_nothing_after_the_update(pools: Pools) -> None:
    pools(WORLD).run(copied_traffic)


def refused() -> None:
    assert dist.get_world_size() == WORLD
    for config, words in (
        ({"sharding": {"group_size": 3}}, "does not divide"),
        ({"sharding": {"group_size": 8}}, "does not divide"),
        ({"sharding": {"group_size": 2}, "experts": {"parallel_size": 2, "parameters": ["layers.0.*"]}}, "exclude"),
    ):
        with pytest.raises(ConfigError, match=words):
            zw.initialize(Whole(), None, {"compile": {"enabled": False}, **config})


class Branch(nn.Module):
    """Runs the layers that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 20) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        return torch.stack([self.layers[i](x).sum() * (i + 1) for i in order]).sum()


def departing(group: Group, config: dict[str, Any], reads: bool) -> tuple[list[Any], int]:
    """From the fifth step on rank 1 leaves a layer out, and so the schedule, which the other ranks follow."""
    torch.manual_seed(3)
    model, seen = Branch(), []
    base = {"compile": {"enabled": False}, "bucket": {"bytes": 4096}, "sharding": sharding(group)}
    with zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), {**base, **config}) as engine:
        for step in range(7):
            left_out = step >= 4 and engine.rank == 1
            engine.backward(engine(batch(step, 0, engine.rank, torch.float32), (0, 2, 3) if left_out else (0, 1, 2, 3)))
            if reads:
                seen.append({name: value.clone() for name, value in engine.gradients().items()})
            engine.step()
            seen.append({name: engine.full(name) for name, _ in engine.module.named_parameters()})
        return seen, engine.stats.departures


def compare_departing(config: dict[str, Any], reads: bool, group: Group) -> tuple[list[tuple[int, str]], int]:
    (expected, _), (found, departures) = departing(None, config, reads), departing(group, config, reads)
    pairs = enumerate(zip(expected, found, strict=True))
    return [(at, name) for at, (one, two) in pairs for name in one if not torch.equal(one[name], two[name])], departures


@pytest.mark.parametrize(
    ("stage", "depth", "clip", "reads", "group"),
    [
        (2, 2, None, False, 2),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in [
                (2, 1, None, False, 2),
                (2, 2, 1e9, False, 2),
                (2, 1, None, True, 2),
                (1, 2, None, True, 2),
                (1, 1, 1e9, False, 2),
                (2, 2, None, False, "2c"),
                (1, 1, 1e9, True, "2c"),
            ]
        ),
    ],
)
def test_a_rank_departs_from_the_schedule_alone(
    stage: int, depth: int, clip: float | None, reads: bool, group: Group, pools: Pools
) -> None:
    config = {"stage": stage, "reduce": {"depth": depth}, "gradient_clipping": clip, "deadline_seconds": 60}
    found = pools(WORLD).run(compare_departing, config, reads, group)
    assert [wrong for wrong, _ in found] == [[]] * WORLD
    assert [departures > 0 for _, departures in found] == [False, True, False, False]


def refused_writes(group: Group, stage: int, way: str) -> tuple[str, dict[str, Tensor]]:
    with engine_of(group, "adamw", {"stage": stage, "deadline_seconds": 60}) as engine:
        train(engine, range(2))
        with pytest.raises((EngineError, KeyError)) as told, engine.full_parameters(), torch.no_grad():
            if engine.rank == 0:
                engine.module.head.bias.add_(1.0)
            if way == "raised":
                raise KeyError("by the program")
        train(engine, range(2, 4))
        return str(told.value), {name: engine.full(name) for name, _ in engine.module.named_parameters()}


def compare_refused(stage: int, way: str) -> list[str]:
    told, expected = refused_writes(None, stage, way)
    wrong = []
    for group in (2, "2c"):
        also, found = refused_writes(group, stage, way)
        assert told == also
        wrong += [name for name in expected if not torch.equal(expected[name], found[name])]
    return wrong


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["different", "raised"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_wrote_is_not_kept(stage: int, way: str, pools: Pools) -> None:
    assert pools(WORLD).run(compare_refused, stage, way) == [[]] * WORLD


def gathers_after_the_step() -> tuple[int, int, int]:
    with engine_of(2, "adamw", {}) as engine:
        train(engine, range(3))
        calls = engine.stats.total["all_gather across"].calls
        with torch.no_grad():
            engine(batch(0, 0, engine.rank, torch.float32))
        trained = sum(bucket.trainable for bucket in engine.schedule.facts.buckets)
        return calls, engine.stats.total["all_gather across"].calls, trained


def test_the_step_itself_starts_the_gathers_across_groups(pools: Pools) -> None:
    for before, after, trained in pools(WORLD).run(gathers_after_the_step):
        assert before == after == 1 + trained * 4, "the frozen bucket once; the others at first, and after each step"


def meshed() -> str:
    made = {}
    for names in (("replicate", "shard"), ("data", "model")):
        made[names] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    config = {"compile": {"enabled": False}}
    with pytest.raises(ConfigError, match="mesh_dim_names"):
        zw.initialize(Whole(), None, config, mesh=made["data", "model"])
    with pytest.raises(ConfigError, match="leave one out"):
        zw.initialize(Whole(), None, {**config, "sharding": {"group_size": 4}}, mesh=made["replicate", "shard"])
    with zw.initialize(Whole(), None, config, mesh=made["replicate", "shard"]) as engine:
        engine.eval()
        engine(torch.ones(2, 24))
        return ", ".join(engine.stats.total)


@pytest.mark.matrix
def test_a_mesh_has_the_size_of_groups(pools: Pools) -> None:
    for kinds in pools(WORLD).run(meshed):
        assert "all_gather across" in kinds


@pytest.mark.matrix
def test_groups_that_there_cannot_be(pools: Pools) -> None:
    pools(WORLD).run(refused)
