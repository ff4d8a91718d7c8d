"""Mixtral and Qwen3-MoE of transformers with more experts than a rank has tokens for, from the first step on.

24 experts, two for each of 5 tokens that are other ones on each rank: in every layer many experts have gradients on
some ranks only, and some on none, which the optimizer then skips. What is compared with what says `uneven`; in the
float64 model, too, transformers computes norms, rotations and softmax in float32. Which experts a token goes to
must not depend on rounding: the job asserts that the float64 model's logits of the last expert that is taken and of the
first that is not are further apart than any rounding, and that experts really differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.runtime.uneven import Job, Result, Setting, beside, say
from tests.support.harness import Pools

pytestmark = pytest.mark.matrix

EXPERTS, TOKENS, TAKEN, VOCABULARY = 24, 5, 2, 64
MARGIN = 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": TAKEN,
    "use_cache": False,
    "experts_implementation": "eager",  # transformers 5 has grouped products otherwise, and none of them in float64
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "head_dim": 8, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **own))


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}
SEEDS = {"mixtral": 3, "qwen3_moe": 2}
"""With these no token is between two experts: in all rows margins are 6e-5 or more."""


class Routes:
    """Which experts the float64 model takes on this rank in each step, by layer, and by how much."""

    def __init__(self) -> None:
        self.margin = float("inf")
        self.taken: dict[tuple[str, int, int], set[int]] = {}

    def watch(self, module: nn.Module, place: Callable[[], tuple[int, int]]) -> nn.Module:
        for name, gate in module.named_modules():
            if name.endswith(".gate"):
                gate.register_forward_hook(lambda _, args, out, name=name: self._note(name, place(), out))
        return module

    def _note(self, name: str, place: tuple[int, int], out: Any) -> None:
        logits: Tensor = out[0] if isinstance(out, tuple) else out  # with what transformers 5 makes of them
        if logits.dtype != torch.float64:
            return
        best = logits.detach().topk(TAKEN + 1, dim=-1)
        self.margin = min(self.margin, float((best.values[:, TAKEN - 1] - best.values[:, TAKEN]).min()))
        self.taken[(name, *place)] = set(best.indices[:, :TAKEN].flatten().tolist())


def trained(name: str, setting: Setting, seed: int) -> tuple[Result, float, dict[tuple[str, int, int], set[int]]]:
    say(f"{name}, {setting}, seed {seed}")
    routes, place = Routes(), [0, 0]

    def choose(module: nn.Module, rank: int, step: int, micro: int) -> float:
        place[:] = step, micro
        return 1.0

    def loss(net: Any, rank: int, step: int, micro: int, dtype: torch.dtype) -> Tensor:
        source = torch.Generator().manual_seed(10_000 * seed + 1000 * step + 10 * micro + rank)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=source)
        if dtype == torch.float64 and not routes.taken:
            routes.watch(net, lambda: (place[0], place[1]))
        found: Tensor = net(input_ids=tokens, labels=tokens).loss
        return found

    result = beside(Job(MODELS[name], choose, loss), setting, seed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (routes.margin, routes.taken))
    return result, min(margin for margin, _ in everyone), _unions([taken for _, taken in everyone])


def _unions(ranks: list[dict[tuple[str, int, int], set[int]]]) -> dict[tuple[str, int, int], set[int]]:
    """The experts that some ranks take and others do not."""
    return {key: set.union(*(r[key] for r in ranks)) - set.intersection(*(r[key] for r in ranks)) for key in ranks[0]}


WINDOWS = {"gas 1": (1, 1, 1, 1), "gas 2": (2, 2, 2), "departing": (1, 2, 1, 2)}


def check(outcomes: list[Any], steps: int) -> None:
    for result, margin, uneven in outcomes:
        assert margin > MARGIN, "another seed, please: a token is between two experts"
        assert all(2 <= len(experts) < EXPERTS for experts in uneven.values()), uneven
        assert not result.wrong, "\n".join(result.wrong)
        assert len(uneven) >= 2 * steps and all(result.applied)


@pytest.mark.parametrize(("name", "mode", "steps"), [("qwen3_moe", "eager", 3), ("mixtral", "aot_eager", 2)])
def test_more_experts_than_tokens(pools: Pools, name: str, mode: str, steps: int) -> None:
    check(pools(2).run(trained, name, Setting(3, mode, windows=(1,) * steps), SEEDS[name]), steps)


PRODUCT = [
    (2, stage, mode, how) for stage in (1, 2, 3) for mode in ("eager", "aot_eager", "inductor") for how in WINDOWS
]
PRODUCT += [(world, 3, mode, how) for world in (3, 4) for mode in ("eager", "aot_eager") for how in WINDOWS]
PRODUCT += [(world, 3, "inductor", "gas 2") for world in (3, 4)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world", "stage", "mode", "how"), PRODUCT)
def test_more_experts_than_tokens_everywhere(
    pools: Pools, name: str, world: int, stage: int, mode: str, how: str
) -> None:
    windows = WINDOWS[how]
    outcomes = pools(world).run(trained, name, Setting(stage, mode, windows), SEEDS[name], deadline=600.0)
    check(outcomes, sum(windows))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("stage", "mode"), [(2, "eager"), (3, "eager"), (3, "aot_eager")])
def test_more_experts_than_tokens_left_alone(pools: Pools, name: str, stage: int, mode: str) -> None:
    """Nothing reads gradients, and with them a step's reductions, before the optimizer does."""
    setting = Setting(stage, mode, windows=(1, 1, 1, 1, 1, 1), quiet=True)
    check(pools(2).run(trained, name, setting, SEEDS[name]), 6)
