"""What the names of implementations say, the config of a setting of zeroweave, and the floor's optimizer step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.peers import Name, environment, parse, peers_of
from benchmarks.peers.common import LEARNING_RATE, Options
from benchmarks.peers.compute import Group, adamw
from benchmarks.peers.zeroweave import configuration


def test_a_name_has_a_family_variants_and_a_stage() -> None:
    assert parse("zeroweave-z1") == Name("zeroweave", 1)
    assert parse("zeroweave-graphs-kernel-z3", {"kernel": {}}) == Name("zeroweave", 3, ("graphs", "kernel"))
    assert parse("fsdp2-z2") == Name("fsdp2", 2)
    assert parse("fsdp2-ce-rs-z3") == Name("fsdp2", 3, ("ce", "rs"))
    assert parse("fsdp2-ce-graphs-z2") == Name("fsdp2", 2, ("ce", "graphs"))
    assert parse("fsdp2-graphs-z3") == Name("fsdp2", 3, ("graphs",))
    assert parse("compute-graphs") == Name("compute", 0, ("graphs",))


@pytest.mark.parametrize(
    "name", ["zeroweave", "zeroweave-kernel-z3", "fsdp2-z1", "fsdp2-rs-z3", "fsdp2-graphs-ce-z3", "compute-z3", ""]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {name}; there are zeroweave"):
        parse(name)


def test_only_copy_engines_need_a_variable() -> None:
    for name in ("fsdp2-ce-z3", "fsdp2-ce-rs-z2", "fsdp2-ce-graphs-z3"):
        assert environment(name) == {"NCCL_CTA_POLICY": "2"}
    assert (
        not environment("fsdp2-z3")
        and not environment("fsdp2-graphs-z3")
        and not environment("zeroweave-z3")
        and not environment("compute")
    )


def test_peers_are_of_the_same_stage() -> None:
    settings = ("ce-graphs-", "graphs-", "ce-rs-", "ce-", "")
    assert set(peers_of("zeroweave-graphs-z3")) == {f"fsdp2-{setting}z3" for setting in settings}
    assert peers_of("zeroweave-z1") == peers_of("zeroweave-z2")
    assert set(peers_of("zeroweave-z2")) == {f"fsdp2-{setting}z2" for setting in settings}
    for name in peers_of("zeroweave-z3"):
        assert parse(name).family == "fsdp2"
    assert peers_of("fsdp2-ce-z3") == ()


BFLOAT16 = {"params": "bfloat16", "reduce": "bfloat16"}


def test_variants_win_over_the_command_line_and_are_merged_key_by_key() -> None:
    options = Options(
        zeroweave={"compile": {"prefetch": 2, "keep": "all"}},
        variants={"late": {"compile": {"prefetch": 0}}},
        gas=4,
    )
    assert configuration(3, ("graphs", "late"), options) == {
        "stage": 3,
        "gradient_accumulation_steps": 4,
        "precision": BFLOAT16,
        "compile": {
            "lower": "inductor",
            "memory_budget": "none",
            "prefetch": 0,
            "keep": "all",
            "cuda_graphs": True,
        },
    }


def test_nothing_is_compiled_if_nothing_is_lowered() -> None:
    assert configuration(2, (), Options(lower="none"))["compile"] == {
        "enabled": False,
        "memory_budget": "none",
        "cuda_graphs": False,
    }


def test_what_is_free_is_filled_by_a_variant() -> None:
    assert configuration(3, ("keeps",), Options())["compile"]["memory_budget"] == "auto"


def test_the_update_is_that_of_the_optimizer() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 4))
    ours = nn.Parameter(parameter.detach().to(torch.bfloat16))
    parameter.data.copy_(ours)
    group = Group.of([ours], rank=1, world=2)
    optimizer = torch.optim.AdamW([parameter], lr=LEARNING_RATE)
    for count in range(1, 6):
        ours.grad = torch.randn(8, 4).to(torch.bfloat16)
        parameter.grad = ours.grad.float()
        optimizer.step()
        state = (group.weights, group.masters, group.means, group.squares)
        adamw(*state, group.gradients(), torch.tensor(float(count)))
        assert ours.grad is None
    (master,) = group.masters
    torch.testing.assert_close(master, parameter.detach().view(-1)[16:], rtol=0, atol=1e-7)
    assert torch.equal(ours.view(-1)[16:], master.to(torch.bfloat16)), "the model computes with what was trained"
