"""What is a block, what is a region, and what stays eager: over plain module trees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroweave.compile.regions import call_modules, find_blocks, find_regions, region_key
from zeroweave.errors import ConfigError

GIB = 1 << 30


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Tree(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def blocks(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


def regions(model: nn.Module, patterns: str | list[str] = "auto", max_bytes: int = GIB) -> list[str]:
    return [name for name, _ in find_regions(model, patterns, max_bytes=max_bytes)]


def calls(model: nn.Module) -> list[str]:
    return [name for name, _ in call_modules(model, find_regions(model, max_bytes=GIB))]


@pytest.mark.oldest
def test_a_language_model_has_its_layers_as_blocks_and_its_head_as_a_region() -> None:
    decoder = Tree(embedding=nn.Embedding(8, 4), layers=nn.ModuleList([Block(), Block()]), norm=nn.LayerNorm(4))
    model = Tree(model=decoder, tail=Tree(norm=nn.LayerNorm(4), head=nn.Linear(4, 8)), head=nn.Linear(4, 8))
    assert blocks(model) == ["model.layers.0", "model.layers.1"]
    assert regions(model) == ["model.layers.0", "model.layers.1", "tail"]
    assert calls(model) == ["model.embedding", "model.norm", "head"]


def test_nested_lists_belong_to_the_outer_block() -> None:
    assert blocks(Tree(stages=nn.ModuleList([Stage(), Stage()]))) == ["stages.0", "stages.1"]


def test_a_list_that_repeats_nothing_is_looked_through() -> None:
    model = Tree(parts=nn.Sequential(Stage(), nn.LayerNorm(4), nn.ReLU()))
    assert blocks(model) == ["parts.0.blocks.0", "parts.0.blocks.1"]


def test_a_sequential_of_leaves_is_one_block() -> None:
    model = Tree(mlp=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), norm=nn.LayerNorm(4))
    assert regions(model) == ["mlp"]
    assert calls(model) == ["norm"]
    alone = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert blocks(alone) == [""] and regions(alone) == [""]


def test_a_list_of_leaves_that_cannot_be_called_leaves_its_owner_a_region() -> None:
    model = Tree(body=Tree(layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])))
    assert blocks(model) == []
    assert regions(model) == [""]
    both = Tree(body=model, layers=nn.ModuleList([Block(), Block()]))
    assert regions(both) == ["body", "layers.0", "layers.1"]


def test_leaves_around_blocks_in_one_list_run_eagerly() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4))
    assert blocks(model) == ["1", "2"]
    assert calls(model) == ["0", "3"]


def test_a_list_of_leaves_and_of_something_with_blocks_is_looked_through() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stage(), nn.Linear(4, 4))
    assert blocks(model) == ["1.blocks.0", "1.blocks.1"]


def test_a_block_that_cannot_be_called_is_compiled_by_its_members() -> None:
    pair = lambda: nn.ModuleList([Block(), nn.Linear(4, 4)])  # noqa: E731
    model = Tree(layers=nn.ModuleList([pair(), pair()]))
    assert blocks(model) == ["layers.0", "layers.1"]
    assert regions(model) == ["layers.0.0", "layers.1.0"]
    assert calls(model) == ["layers.0.1", "layers.1.1"]


@pytest.mark.oldest
def test_shared_modules_count_once() -> None:
    block = Block()
    model = Tree(first=nn.ModuleList([block, block, block]), again=block)
    assert blocks(model) == ["first.0"]
    assert regions(model) == ["first.0"]
    shared = nn.Linear(4, 4)
    one, two = Block(), Block()
    one.first = two.second = shared
    model = Tree(layers=nn.ModuleList([one, two]))
    assert blocks(model) == ["layers.0", "layers.1"] and calls(model) == []


def test_without_blocks_the_largest_submodules_that_fit() -> None:
    model = Tree(body=Tree(one=Block(), two=Block(8)), head=nn.Linear(4, 4))
    size = lambda m: sum(p.nbytes for p in m.parameters())  # noqa: E731
    assert regions(model) == [""]
    assert regions(model, max_bytes=size(model) - 1) == ["body"]
    assert regions(model, max_bytes=size(model.body) - 1) == ["body.one", "body.two"]
    assert regions(model, max_bytes=size(model.body.one)) == ["body.one"]


def test_patterns_replace_the_choice() -> None:
    model = Tree(layers=nn.ModuleList([Block(), Block()]), head=nn.Linear(4, 4))
    assert regions(model, ["layers.*.first", "head"]) == [
        "layers.0.first",
        "layers.1.first",
        "head",
    ]
    assert regions(model, ["layers.*"]) == ["layers.0", "layers.1"]
    with pytest.raises(ConfigError, match=r"nothing\.\*"):
        regions(model, ["layers.*", "nothing.*"])
    with pytest.raises(ConfigError, match="auto"):
        regions(model, "layers.*")


def test_weight_norm_does_not_hide_repetition() -> None:
    norm = nn.utils.parametrizations.weight_norm
    assert blocks(nn.Sequential(norm(nn.Linear(4, 4)), nn.ReLU(), norm(nn.Linear(4, 4)))) == [""]


def test_region_keys_tell_apart_what_cannot_share_a_template() -> None:
    assert region_key(Block()) == region_key(Block())
    frozen = Block()
    frozen.first.weight.requires_grad_(False)
    assert len({region_key(m) for m in (Block(), Block(8), frozen, Stage(), Block().bfloat16())}) == 5


def test_regions_with_other_hooks_share_no_template() -> None:
    def hook(*args: object) -> None: ...

    blocks = [Block() for _ in range(8)]
    for block in blocks[:2]:
        next(block.children()).register_forward_hook(hook)
    next(blocks[2].children()).register_forward_pre_hook(hook)
    blocks[3].register_forward_hook(hook)
    next(blocks[4].children()).register_forward_hook(hook, with_kwargs=True)
    next(blocks[5].children()).register_forward_hook(lambda *args: None)
    next(blocks[6].children()).register_full_backward_hook(hook)
    keys = [region_key(block) for block in blocks]
    assert keys[0] == keys[1] and len(set(keys)) == 7
    methods = [Block(), Block()]
    for block in methods:
        block.register_forward_hook(str.upper.__get__("a"))
    assert region_key(methods[0]) != region_key(Block())
