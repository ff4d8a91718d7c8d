"""A model whose parameters are at rest, with every way to reach them that a user has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeroweave.parameters.module_parameters import ModuleParameters, rest
from zeroweave.parameters.stub import StubStatus

NAME = "0.weight"
"""The parameter that `Resting.by` reaches."""


def real_of(name: str, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone().contiguous(), requires_grad=parameter.requires_grad)


@dataclass
class Resting:
    """A model at rest, and every earlier way to its first parameter."""

    model: nn.Module
    list: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    status: StubStatus
    parameters: ModuleParameters

    def by(self, route: str) -> nn.Parameter:
        return {
            "module": lambda: self.model.get_parameter(NAME),
            "list": lambda: self.list[0],
            "groups": lambda: self.optimizer.param_groups[0]["params"][0],
        }[route]()


ROUTES = ("module", "list", "groups")


def make_resting(model: nn.Module) -> Resting:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    status = StubStatus()
    return Resting(model, parameters, optimizer, status, rest(model, status, real_of))
