"""What contradicts an engine is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zeroweave as zw

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

from tests.distributed.integrations import accelerating as runs
from zeroweave.integrations.accelerate import ZeroweaveAccelerator

EAGER = {"compile": {"enabled": False}}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with runs.environment():
        yield


def made(**more: Any) -> ZeroweaveAccelerator:
    return ZeroweaveAccelerator(cpu=True, **{"zeroweave_config": EAGER, **more})


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = runs.Model()
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepspeed_plugin": ({"deepspeed_plugin": object()}, "from_deepspeed"),
    "deepspeed_plugins": ({"deepspeed_plugins": {"a": object()}}, "from_deepspeed"),
    "fsdp_plugin": ({"fsdp_plugin": FullyShardedDataParallelPlugin}, 'FULL_SHARD is {"stage": 3}'),
    "megatron_lm_plugin": ({"megatron_lm_plugin": object()}, "leave it out"),
    "torch_tp_plugin": ({"torch_tp_plugin": object()}, "tensor, context and sequence parallelism"),
    "parallelism_config": ({"parallelism_config": ParallelismConfig()}, "tensor, context and sequence parallelism"),
    "dynamo_backend": ({"dynamo_backend": "inductor"}, "the engine compiles by itself"),
    "dynamo_plugin": ({"dynamo_plugin": TorchDynamoPlugin(backend="eager")}, "the engine compiles by itself"),
    "AutocastKwargs": ({"kwargs_handlers": [AutocastKwargs()]}, "around a block instead"),
    "GradScalerKwargs": ({"kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]}, "initial_loss_scale"),
    "comm_hook": (
        {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]},
        "precision",
    ),
    "save_on_each_node": ({"project_config": ProjectConfiguration(save_on_each_node=True)}, "shared folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_shards_or_wraps_by_itself_is_refused(name: str) -> None:
    arguments, instead = REFUSED[name]
    with pytest.raises(zw.UnsupportedError, match=re.escape(instead)) as refused:
        made(**arguments)
    assert name.removesuffix("_plugin") in str(refused.value)


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_what_a_launcher_asks_for_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(zw.UnsupportedError, match=f"ACCELERATE_USE_{name}: "):
        made()


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "Accelerate counts micro-steps"),
        ({"checkpoint": {"save_on_signal": "here"}}, {}, "save with Accelerate"),
        ({"precision": {"params": "bfloat16"}}, {"mixed_precision": "bf16"}, "precision.params .* say one of them"),
        ({"stages": 2}, {}, "did you mean 'stage'"),
    ],
)
def test_configs_that_say_what_accelerate_says(config: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(zw.ConfigError, match=said):
        made(zeroweave_config=config, **more)


def test_handlers_that_change_no_result_are_taken() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
    model, optimizer = made(kwargs_handlers=[handler]).prepare(*parts())
    assert model.engine.config.precision.autocast is None and optimizer.param_groups[0]["lr"] == 0.1


def test_a_config_of_the_precision_alone_is_merged() -> None:
    config = {**EAGER, "precision": {"reduce": "float32", "loss_scale": 8.0}}
    model, _ = made(zeroweave_config=config, mixed_precision="bf16").prepare(*parts())
    found = model.engine.config.precision
    assert (found.autocast, found.reduce, found.loss_scale) == ("bfloat16", "float32", 8.0)


def test_an_optimizer_is_prepared_with_its_model() -> None:
    accelerator, (model, optimizer) = made(), parts()
    for args in ((optimizer,), (torch.nn.Linear(2, 2), optimizer)):
        with pytest.raises(zw.EngineError, match="SGD without its model"):
            accelerator.prepare(*args)
    with pytest.raises(zw.EngineError, match="SGD without its model"):
        accelerator.prepare_optimizer(optimizer)
    with pytest.raises(zw.EngineError, match="no model is trained yet"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    accelerator.prepare(optimizer, model)
    with pytest.raises(zw.EngineError, match="second optimizer"):
        accelerator.prepare(*parts())


def test_a_list_of_optimizers_is_one_argument() -> None:
    torch.manual_seed(0)
    model = runs.Model()
    twin = runs.Model()
    twin.load_state_dict(model.state_dict())
    every = [[p for p in each.parameters() if p.requires_grad] for each in (model, twin)]
    both, others = (
        [torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.1), torch.optim.SGD([p for p in ps if p.ndim == 1], 0.1)]
        for ps in every
    )
    accelerator = made()
    prepared, optimizer, scheduler = accelerator.prepare(
        model, both, torch.optim.lr_scheduler.ExponentialLR(both[0], 0.5)
    )
    assert accelerator.engine.optimizer.members == tuple(both)
    for step in range(3):
        batch = torch.full((2, runs.WIDTH), 1.0 + step)
        accelerator.backward(prepared(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        twin(batch).square().mean().backward()
        for each in others:
            each.step()
            each.zero_grad()
        others[0].param_groups[0]["lr"] *= 0.5
    expected = twin.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in accelerator.get_state_dict(prepared).items())
    with pytest.raises(zw.EngineError, match="pass a list of optimizers as one argument"):
        made().prepare(twin, *others)


def test_dummies_and_placements_are_refused() -> None:
    class DummyOptim: ...

    accelerator, (model, optimizer) = made(), parts()
    with pytest.raises(zw.UnsupportedError, match="DummyOptim stands for a section of a DeepSpeed config"):
        accelerator.prepare(model, DummyOptim())
    with pytest.raises(zw.UnsupportedError, match="device_placement=False for Model"):
        accelerator.prepare(model, optimizer, device_placement=[False, True])
    with pytest.raises(zw.UnsupportedError, match="device_placement=False for Model"):
        made(device_placement=False).prepare(model, optimizer)
    accelerator.prepare(model, optimizer, device_placement=[True, False])


def test_what_the_engine_cannot_do_with_gradients_is_refused() -> None:
    accelerator = made(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*parts())
    whole = list(model.parameters())
    with accelerator.accumulate(model):
        loss = model(torch.ones(2, runs.WIDTH)).square().mean()
        with pytest.raises(zw.UnsupportedError, match="create_graph"):
            accelerator.backward(loss, create_graph=True)
        accelerator.backward(loss)
        with pytest.raises(zw.EngineError, match=r"if accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(whole, 1.0)
        optimizer.step()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, runs.WIDTH)).square().mean())
        with pytest.raises(zw.UnsupportedError, match="2-norm only"):
            accelerator.clip_grad_norm_(whole, 1.0, norm_type=1)
        with pytest.raises(zw.UnsupportedError, match="1 parameters, which are not all of the model's"):
            accelerator.clip_grad_norm_(whole[0], 1.0)
        with pytest.raises(zw.UnsupportedError, match="clip_grad_norm_"):
            accelerator.clip_grad_value_(whole, 1.0)
        with pytest.raises(zw.UnsupportedError, match="without one"):
            optimizer.step(lambda: None)
        accelerator.unscale_gradients()
        norm = accelerator.clip_grad_norm_((p for p in whole if p.requires_grad), 1e-3)
        optimizer.step()
    assert float(norm) > 1e-3 and model.engine.get_global_grad_norm() == float(norm)
    assert model.engine.global_steps == 1 and model.engine.micro_steps == 2


def test_a_list_of_parameters_from_before_is_clipped() -> None:
    model, optimizer = parts()
    earlier = list(model.parameters())
    accelerator = made(zeroweave_config={**EAGER, "stage": 2, "gather_after_step": True})
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, runs.WIDTH)).square().mean())
    assert float(accelerator.clip_grad_norm_(earlier, 1.0)) > 0


def test_a_prepared_model_has_what_the_users_has() -> None:
    prepared, _ = made().prepare(*parts())
    assert prepared.blocks is prepared.module.blocks and prepared.frozen.in_features == runs.WIDTH
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        _ = prepared.nothing


def test_an_accelerator_for_each_of_two_models() -> None:
    """Each trains as it does alone."""
    pairs = [(made(), *parts()) for _ in range(2)]
    plain = runs.Model()
    plain.load_state_dict(pairs[0][1].state_dict())
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    prepared = [(accelerator, *accelerator.prepare(model, sgd)) for accelerator, model, sgd in pairs]
    for step in range(3):
        for accelerator, model, sgd in prepared:
            accelerator.backward(model(torch.full((2, runs.WIDTH), float(step))).square().mean())
            sgd.step()
            sgd.zero_grad()
        plain(torch.full((2, runs.WIDTH), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = prepared[0][0].get_state_dict(prepared[0][1])
    assert all(torch.allclose(value, found[name], atol=1e-6) for name, value in plain.state_dict().items())


def test_modules_without_parameters_stay_what_they_are() -> None:
    loss, plain = torch.nn.MSELoss(), Accelerator(cpu=True).prepare(torch.nn.MSELoss())
    assert type(made().prepare(loss)) is type(plain) is torch.nn.MSELoss
