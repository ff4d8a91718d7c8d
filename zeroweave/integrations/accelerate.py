"""Accelerate with a zeroweave engine: an `Accelerator` whose prepared model is sharded.

    from zeroweave.integrations.accelerate import ZeroweaveAccelerator as Accelerator

Accelerate keeps what it does around a model: data loaders, schedulers, the count of micro-steps, metrics, trackers. The
engine owns forward, backward and step. Only what touches a model, its gradients or its optimizer is overridden; see
docs/accelerate.md.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend, convert_to_fp32
from torch import nn

from zeroweave.engine import Engine
from zeroweave.engine.assembly import initialize
from zeroweave.errors import CheckpointError, EngineError, UnsupportedError
from zeroweave.integrations.wrapped import (
    ConfigLike,
    ZeroweaveModel,
    autocasting,
    clip,
    drop,
    refuse_other_device,
    settings_of,
)
from zeroweave.optim.multi_optimizer import given, is_optimizer

StrPath = str | os.PathLike[str]

_MESH = "tensor, context and sequence parallelism are not there: leave it out"
_SHARDING: Final = {
    "deepspeed": "the engine shards instead: zeroweave.Config.from_deepspeed(its JSON) is its config",
    "fsdp": 'the engine shards instead: FULL_SHARD is {"stage": 3} in its config, SHARD_GRAD_OP {"stage": 2}',
    "megatron_lm": "the engine trains the model as it is: leave it out",
    "torch_tp": _MESH,
    "parallelism_config": _MESH,
}
"""What shards in Accelerate, by the names in its arguments and in the variables that `accelerate launch` sets."""
_TYPES: Final = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
_AUTOCASTS: Final = {"bf16": "bfloat16", "fp16": "float16"}
"""What `mixed_precision` is for an engine."""


class AcceleratedModel(ZeroweaveModel):
    """Where its engine autocasts, narrower floating outputs become float32, as Accelerate has it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, convert_to_fp32 if engine.config.precision.autocast else None)
        self._is_accelerate_prepared = True  # Accelerate lists it, and prepares it no further


class ZeroweaveOptimizer(AcceleratedOptimizer):
    """The user's optimizer, whose `step` is the engine's. It is to be called by all ranks, as everything here."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self._is_accelerate_prepared = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Ends a micro-step; where Accelerate syncs gradients, the optimizer step."""
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): the engine steps without one; call it without")
        ends = self.gradient_state.sync_gradients
        self._engine.set_gradient_accumulation_boundary(ends)
        self._engine.step()
        self._engine.set_gradient_accumulation_boundary(None)
        if ends:
            self._is_overflow = not self._engine.was_step_applied()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops gradients that wait, where Accelerate syncs gradients. After a step there are none."""
        if self.gradient_state.sync_gradients:
            drop(self._engine, self.optimizer.zero_grad)


class ZeroweaveAccelerator(Accelerator):
    """An `accelerate.Accelerator` that trains one model with a zeroweave engine, and evaluates others with theirs.

    `zeroweave_config`: what `zeroweave.initialize` takes as config. All else are Accelerate's arguments;
    `mixed_precision` becomes `precision.autocast`. UnsupportedError or ConfigError, by name, for what engines do not
    support. Methods that are not here are Accelerate's own.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zeroweave_config: ConfigLike | None = None, **kwargs: Any) -> None:
        _refuse_before(args, kwargs)
        super().__init__(*args, **kwargs)
        _refuse_made(self)
        refuse_other_device(self.device)
        self._config = autocasting(settings_of(zeroweave_config, "Accelerate"), self.mixed_precision, _AUTOCASTS)
        self.scaler = None  # the engine scales losses

    @property
    def engine(self) -> Engine:
        """The engine of the model that is trained. EngineError before `prepare`."""
        if (engine := _trained(self._models)) is None:
            raise EngineError("[ZW802] no model is trained yet: call accelerator.prepare(model, optimizer, ...) first")
        return engine

    # ------------------------------------------------------------------ prepare
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; a model and its optimizer, which are given together, become an engine. Collective.

        A list of optimizers, or a `WholeMatrices`, is one optimizer, as for `initialize`. A model without an optimizer
        is sharded for evaluation. EngineError for an optimizer without its model, and for a second model that is to be
        trained.
        """
        _refuse_dummies(args)
        made: dict[int, Any] = {}
        for optimizer in args:
            if not is_optimizer(optimizer) or _is_prepared(optimizer):
                continue
            members = [each.optimizer for each in given(optimizer)]
            model = _model_of(members, args)
            if made or _trained(self._models) is not None:
                raise EngineError(
                    f"[ZW802] {type(members[0]).__name__} is the second optimizer: an accelerator trains one model "
                    "with one optimizer; use one with several groups, or pass a list of optimizers as one argument; "
                    "join the models in one torch.nn.Module, or make an accelerator for each"
                )
            self._refuse_placement(model, args, device_placement)
            engine = initialize(model, optimizer, self._config)
            made[id(model)], made[id(optimizer)] = AcceleratedModel(engine), ZeroweaveOptimizer(engine)
        return super().prepare(*(made.get(id(each), each) for each in args), device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """A model for evaluation: sharded, and cast as `mixed_precision` says. Collective."""
        if not _is_prepared(model) and next(model.parameters(), None) is not None:
            self._refuse_placement(model, [model], None if device_placement is None else [device_placement])
            model = AcceleratedModel(initialize(model, config=self._config))
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # there is nothing to replicate

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """EngineError, unless it is prepared: an optimizer is prepared with its model."""
        if not _is_prepared(optimizer):
            _model_of([optimizer], ())
        return super().prepare_optimizer(optimizer, device_placement)

    def _refuse_placement(self, model: nn.Module, args: Sequence[Any], placement: Sequence[bool | None] | None) -> None:
        given = dict(zip(map(id, args), placement or (), strict=False)).get(id(model))
        if not (self.device_placement if given is None else given):
            raise UnsupportedError(
                f"device_placement=False for {type(model).__name__}: its shards lie on the accelerator's device; leave "
                'it out, and see "offload" in zeroweave_config for host memory'
            )

    # ------------------------------------------------------------------ gradients
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerate's: the backward of `loss`, divided by `gradient_accumulation_steps`. Collective.

        UnsupportedError for other keywords than `retain_graph`.
        """
        retain = kwargs.pop("retain_graph", None)
        if kwargs:
            raise UnsupportedError(f"accelerator.backward({', '.join(kwargs)}=...): the engine takes retain_graph only")
        self.engine.backward(loss / self.gradient_accumulation_steps, bool(retain), scale_wrt_gas=False)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scales the gradients of the model to a global 2-norm of at most `max_norm`; returns the norm before.

        float32, 0-dim, on the accelerator's device. UnsupportedError for other norms, and for a part of the model's
        parameters; EngineError in the middle of an accumulation. Collective.
        """
        if not self.sync_gradients:
            raise EngineError(
                "[ZW402] clip_grad_norm_() in the middle of an accumulation, where gradients are not complete: call it "
                "under `if accelerator.sync_gradients:`"
            )
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return clip(self.engine, given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """UnsupportedError: gradients are sharded."""
        raise UnsupportedError("clip_grad_value_(): gradients are sharded over the ranks; use clip_grad_norm_()")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: all gradients that the engine shows are without the loss scale."""

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """UnsupportedError on several ranks: all of them take the same steps."""
        if self.use_distributed:
            raise UnsupportedError(
                "join_uneven_inputs(): all ranks take the same number of steps; leave even_batches on, or drop the "
                "last batch"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    # ------------------------------------------------------------------ models
    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The user's own module. Its parameters are at rest between calls: see docs/training.md."""
        if isinstance(model, AcceleratedModel):
            return model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Full tensors on the CPU of rank 0, `{}` on the others. Not `unwrap`: names begin with "module.". Collective.

        From the float32 masters, in the model's original dtypes.
        """
        if not isinstance(model, AcceleratedModel):
            return super().get_state_dict(model, unwrap)
        state = model.engine.state_dict()
        return state if unwrap else {f"module.{name}": value for name, value in state.items()}

    # ------------------------------------------------------------------ checkpoints
    def save_state(self, output_dir: StrPath | None = None, safe_serialization: bool = True) -> str:
        """As Accelerate's; returns the folder. EngineError in the middle of an accumulation. Collective.

        Accelerate writes schedulers, samplers and registered objects, and each engine a checkpoint in the folder
        `zeroweave` of it. What an earlier call has left in the folder is removed first.
        """
        if not self.sync_gradients:  # before anything is removed
            raise EngineError(
                "save_state() in the middle of an accumulation, of which a checkpoint has no gradients: call it after "
                "the optimizer.step() that ends it, where accelerator.sync_gradients is true"
            )
        if output_dir is not None and not self.project_configuration.automatic_checkpoint_naming:
            self._remove_engines(Path(output_dir))
        with self._engines_apart() as engines:
            folder = super().save_state(output_dir, safe_serialization)
        for index, engine in enumerate(engines):
            engine.save(_place(folder, index), client_state={"step": self.step})
        return str(folder)

    def load_state(
        self, input_dir: StrPath | None = None, load_kwargs: dict[str, Any] | None = None, *, strict: bool = True
    ) -> None:
        """Continues where `save_state` was called, at any stage, bit by bit on the same number of ranks. Collective.

        Engines are loaded first: CheckpointError, before anything has changed, where one cannot be. `strict`: as
        `Engine.load` has it.
        """
        found: list[dict[str, Any]] = []
        with self._engines_apart() as engines:

            def load(_: Any, folder: str) -> None:
                if not all(_place(folder, index).is_dir() for index in range(len(engines))):
                    raise CheckpointError(
                        f"[ZW601] {folder} has no checkpoint of an engine: ZeroweaveAccelerator.save_state has not "
                        "written it, or was not done when the run ended"
                    )
                found.extend(engine.load(_place(folder, i), strict=strict) for i, engine in enumerate(engines))

            handle = self.register_load_state_pre_hook(load)  # it is told the folder
            try:
                super().load_state(input_dir, load_kwargs)
            finally:
                handle.remove()
        for client in found[:1]:
            self.step = client["step"]  # a rank that the run did not have finds none among Accelerate's files

    @contextmanager
    def _engines_apart(self) -> Iterator[list[Engine]]:
        """Inside, Accelerate neither saves nor loads the models and optimizers of engines, which it yields."""
        models, optimizers = self._models, self._optimizers
        self._models = [each for each in models if not isinstance(each, AcceleratedModel)]
        self._optimizers = [each for each in optimizers if not isinstance(each, ZeroweaveOptimizer)]
        try:
            yield [each.engine for each in models if isinstance(each, AcceleratedModel)]
        finally:
            self._models, self._optimizers = models, optimizers

    def _remove_engines(self, folder: Path) -> None:
        """A run that ends while it saves leaves no state that is partly an older one."""
        if self.is_main_process:
            for place in (_place(folder, index) for index in range(len(self._models))):
                if place.exists():
                    shutil.rmtree(place)
        self.wait_for_everyone()


def _place(folder: StrPath, index: int) -> Path:
    """Where the engine of that number saves, as Accelerate numbers its files."""
    return Path(folder) / (f"zeroweave_{index}" if index else "zeroweave")


def _is_prepared(thing: Any) -> bool:
    return bool(getattr(thing, "_is_accelerate_prepared", False))


def _trained(models: Iterable[nn.Module]) -> Engine | None:
    """The engine of the model that is trained."""
    engines = (model.engine for model in models if isinstance(model, AcceleratedModel))
    return next((engine for engine in engines if engine.optimizer is not None), None)


def _model_of(optimizers: Sequence[torch.optim.Optimizer], args: Iterable[Any]) -> nn.Module:
    """The model among `args` that has the optimizers' parameters."""
    mine = {id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]}
    for model in args:
        if isinstance(model, nn.Module) and not _is_prepared(model):
            if any(id(parameter) in mine for parameter in model.parameters()):
                return model
    raise EngineError(
        f"[ZW802] {type(optimizers[0]).__name__} without its model: an engine is made of both; make the optimizer "
        "before, and call accelerator.prepare(model, optimizer, ...)"
    )


def _refuse_dummies(args: Iterable[Any]) -> None:
    for name in (type(each).__name__ for each in args):
        if name in ("DummyOptim", "DummyScheduler"):  # Accelerate has them only for DeepSpeed
            raise UnsupportedError(
                f"{name} stands for a section of a DeepSpeed config: pass an optimizer, or a scheduler, of torch"
            )


def _refuse_before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """UnsupportedError for arguments of `Accelerator`, and variables, that would have it shard or wrap models."""
    given = inspect.signature(Accelerator).bind_partial(*args, **kwargs).arguments
    found = []
    for kind, why in _SHARDING.items():
        found += [f"{n}: {why}" for n in (f"{kind}_plugin", f"{kind}_plugins", kind) if given.get(n) is not None]
        if os.environ.get(variable := f"ACCELERATE_USE_{kind.upper()}", "").lower() == "true":
            found.append(f"{variable}: {why}")
    _refuse(found)


def _refuse_made(made: Accelerator) -> None:
    """UnsupportedError for what an accelerator has been told, by any way, that an engine cannot honour."""
    found = []
    if made.distributed_type not in _TYPES:
        found.append(f"distributed_type {made.distributed_type.value}: zeroweave trains on CPUs and NVIDIA GPUs")
    if made.state.dynamo_plugin.backend != DynamoBackend.NO:
        found.append('dynamo_backend: the engine compiles by itself: leave it out, and see "compile" in its config')
    if made.fp8_enabled:
        found.append('mixed_precision="fp8": use "bf16"')
    if made.autocast_handler is not None:
        found.append("AutocastKwargs: pass it to accelerator.autocast(autocast_handler=...) around a block instead")
    if made.scaler_handler is not None:
        found.append(
            'GradScalerKwargs: the engine scales losses; say it in its config, as {"precision": '
            '{"initial_loss_scale": ..., "loss_scale_window": ...}}'
        )
    if made.ddp_handler is not None and made.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
        found.append(
            'DistributedDataParallelKwargs(comm_hook): say it in its config, as {"precision": {"reduce": "bfloat16"}}'
        )
    if made.project_configuration.save_on_each_node:
        found.append("ProjectConfiguration(save_on_each_node=True): all ranks write one checkpoint to a shared folder")
    _refuse(found)


def _refuse(found: Sequence[str]) -> None:
    if found:
        raise UnsupportedError("[ZW804] an engine under Accelerate cannot be had with\n  " + "\n  ".join(found))
