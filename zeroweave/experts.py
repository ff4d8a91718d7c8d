"""Expert parallelism: parameters that only some ranks share.

rank           0    1    2    3      with parallel_size 2
experts        A    B    A    B      each rank has some of the layer's experts, under the same names
exchange     (0    1)  (2    3)      `expert_group`: consecutive ranks, through which the model sends its tokens
reduction    (0    2)  (1    3)      ranks with equal experts, over which these are sharded, by the engine
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

import torch.distributed as dist
from torch import nn

from zeroweave.config.sections import ExpertsConfig
from zeroweave.errors import ConfigError, EngineError

GROUP: Final = "experts"
"""The name of the sharding group."""


def expert_group(parallel_size: int) -> dist.ProcessGroup | None:
    """The `parallel_size` consecutive ranks that this one exchanges tokens with; None where that is itself alone.

    For the model's own collectives, so it is there before the engine: experts of rank i of the group are
    the layer's i-th share. Collective over all ranks. The group is the caller's; `destroy_process_group` ends it.
    EngineError without a process group, ConfigError where `parallel_size` does not divide its ranks.
    """
    if parallel_size == 1:
        return None
    if not dist.is_initialized():
        raise EngineError(
            "[ZW402] expert_group() needs a process group: call torch.distributed.init_process_group() before"
        )
    world = dist.get_world_size()
    _check_size(parallel_size, world)
    groups = [dist.new_group(list(range(first, first + parallel_size))) for first in range(0, world, parallel_size)]
    return groups[dist.get_rank() // parallel_size]


def groups_of(config: ExpertsConfig, world: int) -> dict[str, int]:
    """The sharding groups that there are several of, and how many; ConfigError where ranks are left over."""
    _check_size(config.parallel_size, world)
    return {GROUP: config.parallel_size} if config.parallel_size > 1 else {}


def find_experts(model: nn.Module, config: ExpertsConfig) -> frozenset[int]:
    """`id` of each parameter that is an expert's, of which one name matches; ConfigError for a pattern without any."""
    named = list(model.named_parameters(remove_duplicate=False))
    missing = [each for each in config.parameters if not any(fnmatchcase(name, each) for name, _ in named)]
    if missing:
        raise ConfigError(
            f"[ZW106] experts.parameters: no parameter matches {', '.join(map(repr, missing))}; patterns are matched "
            f"against the names of model.named_parameters(), such as {named[0][0]!r}"
            if named
            else "[ZW106] experts.parameters: the model has no parameters"
        )
    return frozenset(id(p) for name, p in named if any(fnmatchcase(name, each) for each in config.parameters))


def _check_size(parallel_size: int, world: int) -> None:
    if parallel_size < 1 or world % parallel_size:
        raise ConfigError(
            f"[ZW103] experts.parallel_size {parallel_size} does not divide the {world} ranks: every rank belongs to a "
            "group of that many"
        )
