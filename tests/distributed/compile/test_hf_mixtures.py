"""transformers' own mixtures of experts: which experts run is decided by values, in code that Dynamo cannot capture."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.compile.frame_models import counting_frames, plainly_trained
from tests.support.harness import Pools
from tests.support.marks import WITH_INDUCTOR as MODES
from tests.support.reference import worst

pytestmark = pytest.mark.matrix

EPSILON = torch.finfo(torch.float32).eps


def make(name: str, layers: int) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "use_cache": False,
        "experts_implementation": "eager",  # transformers 5 has grouped products otherwise, and none of them in float64
    }
    torch.manual_seed(0)
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=3))
    more = {"moe_intermediate_size": 24, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more, decoder_sparse_step=1))


def tokens(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 32, (2, 8), generator=generator) for _ in range(steps)]
    return [{"input_ids": each, "labels": each} for each in drawn]


def trained(name: str, stage: int, mode: str, layers: int, steps: int) -> dict[str, Any]:
    """Trains on the same tokens on all ranks; the errors are those of the parameters against float64."""
    model, inputs = make(name, layers), tokens(steps)
    exact = plainly_trained(copy.deepcopy(model).double(), inputs, lambda output: output.loss)
    plain = plainly_trained(model, inputs, lambda output: output.loss)
    with counting_frames() as frames:
        config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 120.0}
        with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config) as engine:
            for batch in inputs:
                engine.backward(engine(**batch).loss)
                engine.step()
            with engine.full_parameters():
                found = {key: p.detach().clone() for key, p in model.named_parameters()}
            calls, eager = engine.stats.compiled_calls, engine.stats.eager_regions
    return {
        "calls": calls,
        "eager": eager,
        "frames": frames.of_package(),
        "error": worst(found, exact),
        "allowed": 2 * worst(plain, exact)[0] + EPSILON,
    }


def check(result: dict[str, Any], mode: str) -> None:
    assert (result["calls"] > 0) == (mode != "eager") and result["eager"] == {} and result["frames"] == set()
    assert result["error"][0] <= result["allowed"], result


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_under_inductor(name: str) -> None:
    check(trained(name, 3, "inductor", layers=1, steps=2), "inductor")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_on_two_ranks(pools: Pools, name: str, stage: int, mode: str) -> None:
    for result in pools(2).run(trained, name, stage, mode, 2, 4, deadline=600.0):
        check(result, mode)
