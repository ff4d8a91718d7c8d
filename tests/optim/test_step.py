"""The sharded optimizer equals the unsharded one, bit for bit, whatever the world and the groups."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.test_clip import norm_of
from tests.optim.world import (
    Net,
    World,
    assert_equal,
    build_net,
    random_gradients,
    unsharded_step,
)
from tests.support.reference import Expected, judge
from zeroweave.errors import ParameterError
from zeroweave.optim import step as step_module
from zeroweave.optim.scaler import Scaled, clip_coefficient

STEPS = 5


def one_group(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


def two_groups(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Matrices and the rest with other learning rates and weight decays; groups cut across buckets."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [
            {"params": others, "lr": 0.05, "weight_decay": 0.0},
            {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        ]
        return kind(groups, **options)

    return make


TESTED = [
    pytest.param(one_group(torch.optim.AdamW, lr=0.01), id="adamw"),
    pytest.param(two_groups(torch.optim.AdamW), id="adamw-two-groups"),
    pytest.param(one_group(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True), id="adamw-foreach"),
    pytest.param(two_groups(torch.optim.Adam), id="adam-two-groups"),
    pytest.param(one_group(torch.optim.SGD, lr=0.1, momentum=0.9), id="sgd"),
    pytest.param(two_groups(torch.optim.SGD, momentum=0.9, nesterov=True), id="sgd-two-groups"),
    pytest.param(one_group(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True), id="sgd-foreach"),
]


@pytest.mark.oldest
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("make", TESTED)
def test_bit_equal_to_the_unsharded_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], world: int) -> None:
    model = build_net()
    sharded = World(model, make, world)
    optimizer = make(model)
    for step in range(STEPS):
        gradients = random_gradients(model, step)
        norm = norm_of(*([*sharded.shards(gradients, rank).values()] for rank in range(world)))
        coefficient = clip_coefficient(norm, 1.0)
        sharded.step(gradients, coefficient)
        unsharded_step(model, optimizer, gradients, coefficient)
    assert_equal(sharded.parameters(), model)


EVERY_KIND = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()


@pytest.mark.oldest
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_optimizers_that_step_bucket_by_bucket(kind: str, foreach: bool) -> None:
    """Each keeps its state per parameter: one call for each bucket equals one call for all."""
    make = one_group(getattr(torch.optim, kind), lr=0.01, foreach=foreach)
    model = build_net()
    by_bucket, whole = World(model, make, 3), World(model, make, 3)
    optimizer = make(model)
    for rank in whole.ranks:
        rank.optimizer.register_step_post_hook(lambda *_: None)
    for step in range(STEPS):
        gradients = random_gradients(model, step)
        by_bucket.step(gradients)
        whole.step(gradients)
        unsharded_step(model, optimizer, gradients)
    assert all(rank.sharded.by_bucket for rank in by_bucket.ranks)
    assert not any(rank.sharded.by_bucket for rank in whole.ranks)
    assert_equal(by_bucket.parameters(), model)
    assert_equal(whole.parameters(), model)


class Counting(torch.optim.AdamW):
    """Notes the elements of the gradients in each of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps.append(sum(p.grad.numel() for g in self.param_groups for p in g["params"] if p.grad is not None))
        super().step(closure)


@pytest.mark.parametrize("offload", ["", "optimizer"])
@pytest.mark.parametrize("room", [1 << 30, 0])
def test_neighbours_are_updated_in_one_call(room: int, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as their casts have room, which are no larger than the largest bucket's; what is offloaded comes alone."""
    monkeypatch.setattr(step_module, "_AT_ONCE", room)
    monkeypatch.setattr(step_module, "ELEMENT_WISE", frozenset({Counting}))
    make = two_groups(Counting)
    model = build_net()
    sharded, optimizer = World(model, make, 2, offload=offload), make(model)
    largest = max(layout.shard_numel for layout in sharded.layouts)
    for step in range(STEPS):
        gradients = random_gradients(model, step)
        sharded.step(gradients, at_once=True)
        unsharded_step(model, optimizer, gradients)
    assert_equal(sharded.parameters(), model)
    trained = [layout for layout in sharded.layouts if layout.trainable]
    for rank in sharded.ranks:
        assert isinstance(rank.optimizer, Counting)
        assert len(rank.optimizer.steps) == STEPS * (1 if room and not offload else len(trained))
        assert room or max(rank.optimizer.steps) <= largest


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_kernels_take_fragments(kind: type[torch.optim.Optimizer]) -> None:
    """Empty ones included. Fused kernels are not bit-equal on fragments, but as near to float64 as on whole tensors."""
    make = one_group(kind, lr=0.01, fused=True)
    model = build_net()
    exact = copy.deepcopy(model).double()
    sharded, optimizer, exact_optimizer = World(model, make, 4), make(model), make(exact)
    for step in range(STEPS):
        gradients = random_gradients(model, step)
        sharded.step(gradients)
        unsharded_step(model, optimizer, gradients)
        unsharded_step(exact, exact_optimizer, {name: gradient.double() for name, gradient in gradients.items()})
    values = ({name: p.detach() for name, p in each.named_parameters()} for each in (model, exact))
    found = judge(sharded.parameters(), Expected(*values))
    assert found[0] <= 1, found


@pytest.mark.oldest
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_gradients_narrower_than_the_masters(gradient_dtype: torch.dtype) -> None:
    make = one_group(torch.optim.AdamW, lr=1e-3)
    model = build_net()
    sharded, optimizer = World(model, make, 3, torch.bfloat16), make(model)
    for step in range(STEPS):
        gradients = {n: g.to(gradient_dtype).float() for n, g in random_gradients(model, step).items()}
        for rank, one in enumerate(sharded.ranks):
            shards = {b: g.to(gradient_dtype) for b, g in sharded.shards(gradients, rank).items()}
            scaled = {id: Scaled(shard) for id, shard in shards.items()}
            update = one.sharded.in_turn(scaled.get, dict.fromkeys(shards, frozenset()), list(shards))
            for bucket in shards:
                update([bucket])
            assert all(v.shard.dtype == torch.float32 for v in one.views.values() if v.layout.trainable)
        unsharded_step(model, optimizer, gradients)
    assert_equal(sharded.parameters(), model)


@pytest.mark.oldest
def test_absent_parameters_are_skipped_and_count_their_own_steps() -> None:
    """No gradient anywhere: no decay, no momentum, no step, as for a `.grad` of None."""
    make = one_group(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    model = build_net()
    sharded, optimizer = World(model, make, 2), make(model)
    for step, without in enumerate(({"layers.1.weight", "tiny"}, set(), {"layers.1.weight"})):
        gradients = random_gradients(model, step, without)
        sharded.step(gradients)
        unsharded_step(model, optimizer, gradients)
    assert_equal(sharded.parameters(), model)
    counted = {int(s["step"]) for rank in sharded.ranks for s in rank.optimizer.state.values()}
    assert counted == {1, 2, 3}


def test_a_parameter_in_no_group_stays_as_it_is() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([model.get_parameter("layers.0.weight"), model.get_parameter("tiny")], lr=0.1)

    model = build_net()
    before = copy.deepcopy(model)
    sharded, optimizer = World(model, make, 3), make(model)
    for step in range(STEPS):
        gradients = random_gradients(model, step)
        sharded.step(gradients)
        unsharded_step(model, optimizer, gradients)
    assert_equal(sharded.parameters(), model)
    assert torch.equal(sharded.parameters()["layers.1.weight"], before.get_parameter("layers.1.weight"))
    assert sum(len(rank.optimizer.state) for rank in sharded.ranks) <= 2 * 3


@pytest.mark.oldest
@pytest.mark.parametrize("cycle", [False, True])
def test_learning_rate_schedulers_see_one_optimizer(cycle: bool) -> None:
    """Values follow the schedule, and PyTorch sees that the optimizer was stepped first: no warning."""

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if cycle:  # changes betas as well
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    make = two_groups(torch.optim.AdamW)
    model = build_net()
    sharded, optimizer = World(model, make, 2), make(model)
    schedulers = [schedule(rank.optimizer) for rank in sharded.ranks]
    reference = schedule(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            gradients = random_gradients(model, step)
            sharded.step(gradients)
            unsharded_step(model, optimizer, gradients)
            for scheduler in (*schedulers, reference):
                scheduler.step()
            assert schedulers[0].get_last_lr() == reference.get_last_lr()
    assert all(rank.sharded.by_bucket for rank in sharded.ranks)
    assert_equal(sharded.parameters(), model)


def test_options_of_a_group_take_effect_at_once() -> None:
    make = two_groups(torch.optim.SGD)
    model = build_net()
    sharded, optimizer = World(model, make, 2), make(model)
    for one in (optimizer, *(rank.optimizer for rank in sharded.ranks)):
        one.param_groups[1]["lr"] = 0.5
    gradients = random_gradients(model, 0)
    sharded.step(gradients)
    unsharded_step(model, optimizer, gradients)
    assert_equal(sharded.parameters(), model)


def test_groups_hold_the_users_parameters_outside_and_fragments_inside() -> None:
    class Spy(torch.optim.SGD):
        seen: list[list[int]] | None = None

        def step(self, closure: Any = None) -> None:
            self.seen = [[p.numel() for p in group["params"]] for group in self.param_groups]
            super().step()

    world = World(build_net(), one_group(Spy, lr=0.1), 3)
    rank = world.ranks[1]
    users = list(rank.model.parameters())
    assert not rank.sharded.by_bucket, "a subclass may do things of its own"
    world.step(random_gradients(rank.model, 0))
    assert [id(p) for p in rank.optimizer.param_groups[0]["params"]] == [id(p) for p in users]
    (seen,) = rank.optimizer.seen
    assert len(seen) == len(users) - 1, "all but the frozen one, empty fragments included"
    assert 0 in seen and sum(seen) < sum(p.numel() for p in users)


def test_a_failing_step_hands_the_groups_back() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no")

    world = World(build_net(), one_group(Failing, lr=0.1), 2)
    rank = world.ranks[0]
    users = list(rank.model.parameters())
    with pytest.raises(ValueError, match="no"):
        world.step(random_gradients(rank.model, 0))
    assert [id(p) for p in rank.optimizer.param_groups[0]["params"]] == [id(p) for p in users]


def test_changed_groups_are_an_error() -> None:
    world = World(build_net(), one_group(torch.optim.SGD, lr=0.1), 2)
    world.ranks[0].optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ParameterError, match="groups changed"):
        world.step(random_gradients(world.ranks[0].model, 0))


def test_memory_counts_state_of_fragments_only() -> None:
    """Two fp32 moments an element over the world, and a counter of 4 bytes for each non-empty fragment."""
    world = World(build_net(), one_group(torch.optim.Adam, lr=0.1), 4)
    assert all(one.sharded.memory() == 0 for one in world.ranks)
    world.step(random_gradients(world.ranks[0].model, 0))
    total = 0
    for rank, one in enumerate(world.ranks):
        trainable = [layout for layout in world.layouts if layout.trainable]
        sizes = [layout.fragment(i, rank).numel for layout in trainable for i in range(len(layout.slots))]
        assert one.sharded.memory() == 8 * sum(sizes) + 4 * sum(size > 0 for size in sizes)
        total += sum(sizes)
    assert total == sum(p.numel() for p in build_net().parameters() if p.requires_grad)


def test_the_optimizer_is_an_ordinary_one_after_destroy() -> None:
    world = World(build_net(), one_group(torch.optim.AdamW, lr=0.1), 2)
    rank = world.ranks[0]
    world.step(random_gradients(rank.model, 0))
    rank.sharded.destroy({})
    rank.sharded.destroy({})
    rank.optimizer.load_state_dict(rank.optimizer.state_dict())

    model, reference = rank.model, build_net()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.copy_(theirs)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    gradients = random_gradients(reference, 3)
    unsharded_step(model, rank.optimizer, gradients)
    unsharded_step(reference, optimizer, gradients)
    assert_equal(dict(model.named_parameters()), reference)


def test_net_has_the_sizes_that_matter() -> None:
    sizes = [p.numel() for p in Net().parameters()]
    assert 0 in sizes and 1 in sizes and 2 in sizes and max(sizes) > 1000
