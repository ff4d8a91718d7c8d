"""Lightning and Fabric with a zeroweave engine. Importing this registers strategies by name, in both:

    import zeroweave.integrations.lightning

    Fabric(strategy="zeroweave_stage3")        Trainer(strategy="zeroweave_stage3")

`ZeroweaveFabricStrategy` and `ZeroweaveStrategy` take a whole config; see docs/lightning.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.plugins import AsyncCheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from zeroweave.engine import Engine
from zeroweave.engine.assembly import initialize
from zeroweave.errors import EngineError, UnsupportedError
from zeroweave.integrations.lightning_fabric import (
    AUTOCASTS,
    ZeroweaveFabricStrategy,
    is_beside,
    load_beside,
    precision_of,
    refuse_options,
    save_beside,
)
from zeroweave.integrations.wrapped import (
    ConfigLike,
    ZeroweaveModel,
    autocasting,
    clip,
    refuse_other_device,
    settings_of,
)

__all__ = ["ZeroweaveFabricStrategy", "ZeroweaveStrategy"]

_KEPT: Final = (
    "convert_module",
    "convert_input",
    "convert_output",
    "tensor_init_context",
    "module_init_context",
    "forward_context",
)
"""Methods of a precision plugin that an engine leaves to it."""


class ZeroweavePrecision(Precision):
    """Lightning's `plugin`, as to modules, inputs and forwards, with an engine's backward, clipping and step."""

    def __init__(self, plugin: Precision, engine: Callable[[], Engine]) -> None:
        self.precision = precision_of(plugin)
        self._engine = engine
        for name in _KEPT:
            setattr(self, name, getattr(plugin, name))

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """`LightningModule.backward` of the loss, which is scaled where there is a loss scale."""
        super().backward(self._engine().scale(tensor), model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """What the Trainer does before an optimizer step, and that of the engine. Collective."""
        if kwargs:
            raise UnsupportedError(f"optimizer.step({', '.join(kwargs)}=...): the engine's has no arguments")
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            raise UnsupportedError("training_step() returned None: the engine skips no backward; return a loss of zero")
        self._engine().step()
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip(self._engine(), None, clip_val, 2)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        raise UnsupportedError(
            'gradient_clip_algorithm="value": gradients are sharded over the ranks; use "norm", which is the default'
        )


class ZeroweaveStrategy(DDPStrategy):
    """The Trainer's `DDPStrategy` for launching and for collectives, with an engine in the place of its wrapper.

    `config`: what `zeroweave.initialize` takes. `options`: those of `DDPStrategy` that are not for the wrapper.
    """

    def __init__(self, config: ConfigLike | None = None, **options: Any) -> None:
        hooks = {name: options.pop(name) for name in list(options) if name.startswith(("ddp_", "model_averaging"))}
        refuse_options(hooks)
        super().__init__(**options)
        refuse_options(self._ddp_kwargs)
        self._config = settings_of(config, "the Trainer")
        self._engine: Engine | None = None
        self._longest = 0.0
        """the most batches that a rank is to predict, infinity where that is unknown"""

    @property
    def engine(self) -> Engine:
        """The engine of the LightningModule. EngineError before the Trainer has set it up."""
        if self._engine is None:
            raise EngineError("[ZW802] the Trainer has set up no model yet: call trainer.fit(model) first")
        return self._engine

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's, with an engine's backward and step."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else ZeroweavePrecision(plugin, lambda: self.engine)

    # ------------------------------------------------------------------ set up
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into an engine."""
        return True

    def setup(self, trainer: Any) -> None:
        """The LightningModule becomes an engine, with its optimizer if it is to be fitted. Collective.

        An engine that an earlier call has left is evaluated as it is; for another fit it is destroyed, and made again.
        """
        self.accelerator.setup(trainer)
        if self._layer_sync is not None:
            raise UnsupportedError("sync_batchnorm=True: batch statistics are each rank's own; leave it out")
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if self._engine is not None and (fits or self._engine.module is not module):
            self._engine.destroy(optimizer_state=False)
            self._engine = None
        if self._engine is None:
            self._engine = self._initialize(trainer, module, fits)
        self.model = ZeroweaveModel(self._engine)
        self.setup_precision_plugin()

    def _initialize(self, trainer: Any, module: Any, fits: bool) -> Engine:
        refuse_other_device(self.root_device)
        module = self.precision_plugin.convert_module(module)
        optimizer = None
        if fits:
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise EngineError(
                    f"[ZW802] configure_optimizers() of {type(module).__name__} gives {len(self.optimizers)} "
                    "optimizers: the Trainer steps one; use one with several groups (zeroweave.initialize itself takes "
                    "a list)"
                )
            (optimizer,) = self.optimizers
        engine = initialize(module, optimizer, autocasting(self._config, self.precision_plugin.precision, AUTOCASTS))
        _update_properties(module, device=self.root_device)  # `self.device`, which its own `to()` would set
        return engine

    def model_to_device(self) -> None:
        """Nothing: `initialize` moves it there, bucket by bucket."""

    def teardown(self) -> None:
        """The engine stays, for later calls of the Trainer, until another fit or `strategy.engine.destroy()`."""
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ------------------------------------------------------------------ training
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Through the engine; of a LightningModule that steps by itself, outside of it, as its submodules' own calls.

        Its calls of backward and step do not belong into a forward.
        """
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def on_predict_start(self) -> None:
        super().on_predict_start()
        mine = torch.tensor(float(sum(self.lightning_module.trainer.predict_loop.max_batches)), device=self.root_device)
        self._longest = float(self.reduce(mine, reduce_op="max"))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """At stage 3 all ranks take part in each forward: one that has fewer batches runs its last one again."""
        output, loop = super().predict_step(*args, **kwargs), self.lightning_module.trainer.predict_loop
        mine = sum(loop.max_batches)
        if self.engine.config.stage == 3 and loop.batch_progress.current.ready == mine:
            for _ in range(int(self._longest - mine)):
                super().predict_step(*args, **kwargs)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """What the Trainer enters around backwards that end no accumulation."""
        assert isinstance(self.model, ZeroweaveModel)
        with self.model.no_sync():
            yield

    # ------------------------------------------------------------------ checkpoints
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """`{}`: the engine saves weights by itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """`{}`: the engine saves the optimizer by itself."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes the folder `filepath`: the engine's checkpoint, and the rest, which is `checkpoint`. Collective.

        Of weights alone it writes a file, as other strategies do, which has them in full.
        """
        if storage_options is not None:
            raise UnsupportedError("save_checkpoint(storage_options=...): checkpoints lie in a folder of all ranks")
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise UnsupportedError(
                "AsyncCheckpointIO: which of two saves is whole could not be told; leave it out, or call "
                "trainer.strategy.engine.save(folder, asynchronous=True)"
            )
        filepath = self.broadcast(filepath)
        if "optimizer_states" in checkpoint:
            save_beside(self.engine, filepath, checkpoint, self.checkpoint_io.save_checkpoint)
        else:
            super().save_checkpoint({**checkpoint, "state_dict": self.engine.state_dict()}, filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads the engine where `save_checkpoint` has saved one, and returns the rest; of a file, all. Collective.

        At any stage, and on any number of ranks. Every byte is checked before anything changes.
        """
        if not is_beside(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)

        def read(file: Path) -> dict[str, Any]:
            return self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)

        return load_beside(self.engine, checkpoint_path, read, self.lightning_module.strict_loading)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes the full state dict of a file. An engine's checkpoint has been loaded already. Collective."""
        if state := checkpoint["state_dict"]:
            if not strict:
                raise UnsupportedError("strict_loading=False of a plain state dict: an engine takes whole ones only")
            self.engine.load_state_dict(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the optimizer's state of a file. Collective."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                optimizer.load_state_dict(state)


for _stage in (1, 2, 3):
    _name, _what = f"zeroweave_stage{_stage}", f"ZeRO stage {_stage} by zeroweave"
    STRATEGY_REGISTRY.register(_name, ZeroweaveFabricStrategy, _what, override=True, config={"stage": _stage})
    StrategyRegistry.register(_name, ZeroweaveStrategy, _what, override=True, config={"stage": _stage})
