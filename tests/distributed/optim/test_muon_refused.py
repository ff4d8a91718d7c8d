"""What whole matrices refuse, what fails with them on one rank, and where they are told to cost something."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed import experts
from tests.distributed.optim.test_muon import build, config, optimizers, train
from tests.distributed.optim.test_muon_beside import Own
from tests.support.harness import Pools
from tests.support.patience import patient

pytestmark = pytest.mark.matrix


def one_by_one() -> list[str]:
    model = build()
    muon, adamw = optimizers(model)
    told = []
    with zw.initialize(model, [muon, adamw], config(3)):
        for call in (muon.state_dict, partial(adamw.load_state_dict, adamw.__getstate__())):
            with pytest.raises(zw.EngineError) as caught:
                call()
            told.append(str(caught.value))
    return told


def test_one_of_several_has_no_state_dict(pools: Pools) -> None:
    for told in pools(2).run(one_by_one):
        assert "state_dict() of Muon alone" in told[0] and "engine.optimizer.state_dict()" in told[0]
        assert "load_state_dict() of AdamW alone" in told[1] and "engine.optimizer.load_state_dict()" in told[1]


# ---------------------------------------------------------------------- what goes wrong
class Tripping(torch.optim.Muon):
    """Raises in its third step where it is told to."""

    trips, steps = False, 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.trips and self.steps == 3:
            raise ValueError(f"no more matrices at {time.time()}")
        return super().step(closure)


def one_trips(stage: int) -> None:
    model = build()
    muon, adamw = optimizers(model)
    mine = Tripping(muon.param_groups[0]["params"], lr=0.02)
    with zw.initialize(model, [zw.WholeMatrices(mine), adamw], config(stage)) as engine:
        mine.trips = engine.rank == 1
        train(engine, range(5))


@pytest.mark.parametrize("stage", [1, 3])
def test_one_ranks_optimizer_raises(disposable: Pools, stage: int) -> None:
    other, own = disposable(2).outcomes(one_trips, stage)
    assert own.kind == "ValueError" and "no more matrices" in own.message, own.describe()
    assert other.failed and "rank 1 failed" in other.stderr + other.message, other.describe()
    assert other.ended - float(own.message.split("matrices at ")[1].split()[0]) < patient(10)


class Growing(torch.optim.Muon):
    """Keeps more from its fourth step on."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for parameter in self.param_groups[0]["params"] if self.steps == 4 else ():
            self.state[parameter]["more"] = torch.zeros_like(parameter)
        return super().step(closure)


def refused(taken: bool) -> str:
    """What `step` says when states are not what they were."""
    model = build()
    mine: Any = Own(model.parameters())
    if not taken:
        mine = Growing([p for p in model.parameters() if p.ndim == 2])
    with zw.initialize(model, zw.WholeMatrices(mine), config(2)) as engine:
        train(engine, range(3))
        for held in mine.state.values() if taken else ():
            held.pop("average", None)
        with pytest.raises(zw.ParameterError) as caught:
            train(engine, range(3, 4))
    return str(caught.value)


def test_states_that_come_and_go(pools: Pools) -> None:
    for told in pools(2).run(refused, True):
        assert "'average' of '" in told and "was taken out of the optimizer's state" in told
    for told in pools(2).run(refused, False):
        assert "keeps something else of '" in told and "'more' (torch.float64)" in told and "in each step" in told


# ---------------------------------------------------------------------- experts
def with_experts(wholes: str) -> tuple[list[str], bool]:
    """Experts by AdamW beside matrices of all ranks, whose values all ranks have; or Muon for experts."""
    model = experts.build(2)
    named = {n: p for n, p in model.named_parameters() if p.ndim == 2 and (".experts." in n) == (wholes == "experts")}
    rest = [p for p in model.parameters() if id(p) not in {id(each) for each in named.values()}]
    both = [torch.optim.Muon(named.values(), lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]
    before = {name: p.detach().clone() for name, p in named.items()}
    settings = config(2, experts={"parameters": [experts.PATTERN], "parallel_size": 2})
    try:
        engine = zw.initialize(model, both, settings)
    except zw.ParameterError as error:
        return [str(error)], all(p is q for p, q in zip(named.values(), both[0].param_groups[0]["params"], strict=True))
    with engine:
        for index in range(3):
            engine.backward(engine(experts.sentences(index, engine.rank, engine.world)))
            engine.step()
    return [], all(bool((p != before[name]).any()) for name, p in named.items())


def test_experts_are_refused_and_others_are_not(pools: Pools) -> None:
    assert pools(2).run(with_experts, "others") == [([], True)] * 2
    for (told,), untouched in pools(2).run(with_experts, "experts"):
        assert untouched and ".experts." in told and "give them to an element-wise optimizer" in told
