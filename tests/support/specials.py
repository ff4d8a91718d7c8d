"""What a program may do in a step of its own, beside a forward that graphs have replayed: nothing comes out otherwise.

Each is a micro-step, given an engine of `tests.support.replays.Net` and a batch; it returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.replays import Case, batch_of, micro_step, started

STEPS, AT = 22, 18
"""Steps, and the one that is special."""
Batch = tuple[Tensor, Tensor]
Special = Callable[[Any, Case, Batch], Tensor]


def ended(engine: Any, loss: Tensor) -> Tensor:
    engine.backward(loss)
    engine.step()
    return loss.detach()


def head(engine: Any, batch: Batch, trains: bool = False) -> Tensor:
    """Part of the model by itself."""
    with torch.set_grad_enabled(trains):
        found: Tensor = engine.module.head(batch[0])
        return found.square().mean()


# ---------------------------------------------------------------------- a window is given up, and its forward is not
def given_up(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    engine.zero_grad()
    return ended(engine, loss)


def given_up_no_sync(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    engine.zero_grad()
    with engine.no_sync():
        engine.backward(loss)
    engine.step()
    return loss.detach()


def given_up_and_read(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    engine.zero_grad()
    head(engine, batch)
    return ended(engine, loss)


def given_up_with_head(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    engine.zero_grad()
    return ended(engine, loss + head(engine, batch, trains=True))


def given_up_boundary(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(not engine.is_gradient_accumulation_boundary())
    engine.backward(loss)
    engine.set_gradient_accumulation_boundary(None)
    engine.step()
    return loss.detach()


# ---------------------------------------------------------------------- something else is computed
def checkpointed(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    x = batch[0].clone().requires_grad_(True)
    return ended(engine, loss + checkpoint(engine.module.head, x, use_reentrant=False).square().mean())


def checkpointed_reentrant(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    x = batch[0].clone().requires_grad_(True)
    return ended(engine, loss + checkpoint(engine.module.head, x, use_reentrant=True).square().mean())


def inference(engine: Any, case: Case, batch: Batch) -> Tensor:
    """In inference mode, on both sides of the backward."""
    loss = engine(*batch)["loss"]
    with torch.inference_mode():
        head(engine, batch)
    engine.backward(loss)
    with torch.inference_mode():
        head(engine, batch)
    engine.step()
    return loss.detach()


def inference_and_head(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    with torch.inference_mode():
        engine.module.head(batch[0])
    return ended(engine, loss + head(engine, batch, trains=True))


def in_a_hook(engine: Any, case: Case, batch: Batch) -> Tensor:
    """On rank 0 alone, inside of the backward."""
    loss = engine(*batch)["loss"] * 1.0

    def look(gradient: Tensor) -> None:
        head(engine, batch)

    if engine.rank == 0:
        loss.register_hook(look)
    return ended(engine, loss)


def saved_on_cpu(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    with torch.autograd.graph.save_on_cpu():
        loss = loss + head(engine, batch, trains=True)
    return ended(engine, loss)


def three_heads(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    for factor in (1.0, 2.0, 3.0):
        loss = loss + head(engine, (batch[0] * factor, batch[1]), trains=True)
    return ended(engine, loss)


def gradient_of_a_head(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    x = batch[0].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(engine.module.head(x).square().mean(), x)
    return ended(engine, loss + gradient.square().mean())


def in_the_loss(engine: Any, case: Case, batch: Batch) -> Tensor:
    """A parameter, as it is shown to the program."""
    loss = engine(*batch)["loss"]
    with engine.full_parameters() as parameters:
        loss = loss + parameters["head.weight"].square().sum()
    return ended(engine, loss)


def written(engine: Any, case: Case, batch: Batch) -> Tensor:
    """Parameters are written between a forward and its backward: that is refused, and the window given up."""
    loss = engine(*batch)["loss"]
    with engine.full_parameters() as parameters, torch.no_grad():
        parameters["head.bias"].add_(0.01)
        parameters["head.weight"].mul_(1.01)
    try:
        ended(engine, loss)
        raise AssertionError("a backward with other parameters")
    except RuntimeError:
        engine.zero_grad()
    return micro_step(engine, case, batch)


# ---------------------------------------------------------------------- and on one rank alone
def read_alone_then_shown(engine: Any, case: Case, batch: Batch) -> Tensor:
    if engine.rank == 0:
        head(engine, batch)
    with engine.full_parameters() as parameters:
        assert parameters["head.bias"].isfinite().all()
    return micro_step(engine, case, batch)


def trained_alone_then_shown(engine: Any, case: Case, batch: Batch) -> Tensor:
    loss = engine(*batch)["loss"]
    if engine.rank == 1:
        loss = loss + head(engine, batch, trains=True)
    with engine.full_parameters() as parameters:
        assert parameters["head.bias"].isfinite().all()
    return ended(engine, loss)


def written_then_read_alone(engine: Any, case: Case, batch: Batch) -> Tensor:
    head(engine, batch)
    with engine.full_parameters() as parameters, torch.no_grad():
        parameters["head.bias"].add_(0.01)
    if engine.rank == 0:
        head(engine, batch)
    return micro_step(engine, case, batch)


def read_alone(engine: Any, case: Case, batch: Batch) -> Tensor:
    if engine.rank == 0:
        head(engine, batch)
    return micro_step(engine, case, batch)


class Trained(NamedTuple):
    """What came of a program: losses and parameters by their text, and micro-steps that were replayed before."""

    losses: str
    values: str
    replayed: int


def train(case: Case, special: Special, graphs: bool) -> Trained:
    """One special micro-step among ordinary ones: the last of its window, which goes on from replays."""
    losses, before = [], 0
    with started(case, graphs) as engine:
        torch.manual_seed(3 + engine.rank)
        for index in range(STEPS):
            for micro in range(case.gas):
                batch = batch_of(case, index, micro, engine.rank)
                if index == AT and micro == case.gas - 1:
                    before = engine.stats.replayed_steps
                    losses.append(special(engine, case, batch))
                else:
                    losses.append(micro_step(engine, case, batch))
        values = {name: value.tolist() for name, value in engine.state_dict().items()}
    return Trained(repr([float(loss) for loss in losses]), repr(values), before)


def both(case: Case, special: Special) -> tuple[bool, int]:
    """Is all the same with graphs and without? And how many micro-steps had been replayed."""
    graphed, plain = train(case, special, True), train(case, special, False)
    return graphed[:2] == plain[:2], graphed.replayed
