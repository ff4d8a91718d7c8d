"""States of few bits in one pass, beside the same arithmetic in several."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.optim.test_compact import KINDS, states, trained
from tests.optim.world import World, build_net, random_gradients
from tests.triton_kernels.kernels import HERE, ROUNDED, rules
from zeroweave.comm.rounding import join_, noise_, split_
from zeroweave.optim.compact import CODES
from zeroweave.optim.quantize8 import BLOCK, Coded, decode, encode_

here_only = pytest.mark.skipif(HERE.type != "cpu", reason="worlds without processes live on the CPU")
WITHOUT = ({"tiny"}, {"tiny"}, {"layers.1.weight", "scalar"}, set[str]())


def random(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(HERE)


def in_one_pass(kind: str, world: int, offload: str = "", rates_here: bool = True) -> World:
    """`rates_here`: learning rates are numbers of the host; else tensors."""
    made = World(build_net(), KINDS[kind], world, torch.bfloat16, offload, rules, compact=True)
    for rank in made.ranks if not rates_here else ():
        for group in rank.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
    for step in range(4):
        made.step(random_gradients(made.ranks[0].model, step, WITHOUT[step]))
    return made


def codes_of(world: World) -> dict[tuple[int, int, str], Tensor]:
    """As numbers, by rank, bucket and key."""
    return {
        (index, bucket, key): coded.codes.int()
        for index, rank in enumerate(world.ranks)
        for bucket, moments in rank.sharded.offload.compact.items()
        for key, coded in moments.coded.items()
    }


@here_only
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 3])
def test_one_pass_does_what_several_do(kind: str, world: int) -> None:
    """A rounding on the way that differs in the last place may lead to the next code, and seldom does."""
    here, there = in_one_pass(kind, world), trained(kind, world)
    mine, theirs = here.parameters(), there.parameters()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(mine[name], value, rtol=2**-15, atol=1e-5), name
    same = [(mine[name] == value).double().mean() for name, value in theirs.items() if value.numel() > 100]
    assert min(same) > 0.99
    ours, wanted = codes_of(here), codes_of(there)
    assert ours.keys() == wanted.keys()
    away = torch.cat([(ours[place] - wanted[place]).abs() for place in wanted])
    assert int(away.max()) <= 1 and float((away > 0).double().mean()) < 1e-3
    for place, value in states(there).items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        assert torch.allclose(states(here)[place], value, rtol=0.05, atol=2e-3 * largest), place
    assert [rank.sharded.memory() for rank in here.ranks] == [rank.sharded.memory() for rank in there.ranks]


@here_only
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_host_memory_have_the_same_bits(kind: str) -> None:
    here, there = in_one_pass(kind, 2), in_one_pass(kind, 2, "optimizer")
    for one, other in ((here.parameters(), there.parameters()), (codes_of(here), codes_of(there))):
        assert one.keys() == other.keys() and all(torch.equal(value, other[place]) for place, value in one.items())
    assert all(torch.equal(value, states(there)[place]) for place, value in states(here).items())


@here_only
def test_rates_on_the_device_make_the_same_steps() -> None:
    one, other = (in_one_pass("adamw", 2, rates_here=here).parameters() for here in (True, False))
    for name, value in other.items():
        assert torch.allclose(one[name], value, rtol=2**-15, atol=1e-5), name


@here_only
def test_what_one_pass_has_left_can_be_read_and_replaced() -> None:
    world = in_one_pass("adamw", 1)
    layout = next(layout for layout in world.layouts if layout.name == "layers.0")
    sharded = world.ranks[0].sharded
    held = dict(sharded.state_of(layout.id, 0))
    assert list(held) == ["step", *CODES] and float(held["step"]) == 4
    sharded.replace(layout.id, {0: {**held, "exp_avg": torch.zeros(33 * 33)}})
    before = sharded.state_of(layout.id, 1)["exp_avg"].clone()
    assert not sharded.state_of(layout.id, 0)["exp_avg"].any()
    world.step(random_gradients(world.ranks[0].model, 9, {layout.slots[1].name}))
    assert sharded.state_of(layout.id, 0)["exp_avg"].any()
    assert torch.equal(sharded.state_of(layout.id, 1)["exp_avg"], before)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("step", [1, 16, 1000])
def test_a_step_is_torchs_between_decoding_and_coding(step: int, coupled: bool) -> None:
    """On a GPU, too. The range ends inside a block, and begins in the middle of the flat."""
    numel, position, rate, decay = 5000, 64 * 70, 1e-2, 0.1
    whole = -(-numel // BLOCK) * BLOCK
    drawn = [random(whole, seed) for seed in range(4)]
    for each in drawn:
        each[numel:] = 0
    noise = noise_(torch.empty(whole, dtype=torch.int32, device=HERE), position, step)
    shard, rest = (torch.empty(whole, dtype=kind, device=HERE) for kind in (torch.bfloat16, torch.int8))
    split_(drawn[0], shard, rest)
    first, second = (Coded.zeros(whole, kind, HERE) for kind in CODES.values())
    encode_(first, drawn[1] * drawn[2].abs())
    encode_(second, drawn[2].square() * drawn[3].square(), noise)
    gradient = drawn[3].bfloat16()

    parameter = nn.Parameter(join_(torch.empty(whole, device=HERE), shard, rest))
    kind = torch.optim.Adam if coupled else torch.optim.AdamW
    optimizer = kind([parameter], lr=rate, weight_decay=decay)
    state = optimizer.state[parameter]
    state |= {"step": torch.tensor(step - 1.0), "exp_avg": decode(first), "exp_avg_sq": decode(second)}
    parameter.grad = gradient.float()
    optimizer.step()
    wanted_first, wanted_second = (Coded.zeros(whole, kind, HERE) for kind in CODES.values())
    encode_(wanted_first, state["exp_avg"], noise)
    encode_(wanted_second, state["exp_avg_sq"], noise)
    wanted_shard, wanted_rest = torch.empty_like(shard), torch.empty_like(rest)
    split_(parameter.detach(), wanted_shard, wanted_rest, noise)

    rules.compact_adam[rules.programs(numel)](
        shard, rest, gradient, first.codes, second.codes, first.scales, second.scales, gradient,
        numel, 1 - rate * decay, rate / (1 - 0.9**step), math.sqrt(1 - 0.999**step), decay, 1 - 0.9, 0.999, 1 - 0.999,
        1e-8, position, step, SPLIT=True, FACTOR=0, COUPLED=coupled, MAXIMIZE=False,
        SIZE=rules.BLOCK, **ROUNDED,
    )  # fmt: skip
    for mine, theirs in ((first, wanted_first), (second, wanted_second)):
        away = (mine.codes.int() - theirs.codes.int()).abs()
        assert int(away.max()) <= 1 and int((away > 0).sum()) <= 5
        assert torch.allclose(mine.scales, theirs.scales, rtol=1e-6)
    mine, theirs = (join_(torch.empty_like(parameter), *each) for each in ((shard, rest), (wanted_shard, wanted_rest)))
    units = (mine.view(torch.int32) - theirs.view(torch.int32)).abs() / 256
    assert float(units.max()) <= 1 and int((units > 0).sum()) <= 5 + numel // 100


@pytest.mark.parametrize("kind", CODES.values())
def test_codes_mean_the_same_everywhere(kind: torch.dtype) -> None:
    """Where kernels run what they do in host memory: shares are true quotients."""
    info = torch.iinfo(kind)
    codes = torch.arange(info.min, info.max + 1).to(kind)
    scales = torch.tensor([1.0, 1 / 3, math.pi * 1e10, 2.0**-94])
    power, top = (2, 127) if kind == torch.int8 else (4, 255)
    share = torch.tensor([code / top for code in codes.tolist()])  # rounded once more, which never matters here
    share = share * share.abs() if power == 2 else share * share * (share * share)
    there = decode(Coded(codes.to(HERE), scales.to(HERE))).cpu()
    assert torch.equal(there, share * scales.repeat_interleave(BLOCK))
    assert torch.equal(there, decode(Coded(codes, scales)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_block_with_an_infinity_is_all_nan(value: float) -> None:
    """As where torch codes it."""
    numel, at = 4 * BLOCK, BLOCK + 3
    gradient = random(numel, 0).bfloat16()
    gradient[at] = value
    state = [torch.zeros(numel, dtype=kind, device=HERE) for kind in (torch.bfloat16, torch.int8)]
    coded = [Coded.zeros(numel, kind, HERE) for kind in CODES.values()]
    rules.compact_adam[rules.programs(numel)](
        *state, gradient, *(each.codes for each in coded), *(each.scales for each in coded), gradient,
        numel, 1.0, 1e-2, 1.0, 0.0, 0.1, 0.999, 1e-3, 1e-8, 0, 1,
        SPLIT=True, FACTOR=0, COUPLED=False, MAXIMIZE=False, SIZE=rules.BLOCK, **ROUNDED,
    )  # fmt: skip
    for mine, moment in zip(coded, (gradient, gradient.square()), strict=True):
        found = decode(mine).view(-1, BLOCK)
        assert found[1].isnan().all() and found[[0, 2, 3]].isfinite().all() and bool(found[0].any())
        theirs = Coded.zeros(numel, mine.codes.dtype, HERE)
        encode_(theirs, moment.float(), noise_(torch.empty(numel, dtype=torch.int32, device=HERE), 0, 1))
        assert torch.equal(mine.codes.view(-1, BLOCK)[1], theirs.codes.view(-1, BLOCK)[1])
        assert mine.scales[1] == theirs.scales[1] == math.inf
