"""A strategy for Lightning Fabric: models that it sets up are sharded by an engine; checkpoints next to Lightning's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from zeroweave.engine import Engine
from zeroweave.engine.assembly import initialize
from zeroweave.errors import CheckpointError, EngineError, NonFiniteError, UnsupportedError
from zeroweave.integrations.wrapped import (
    ConfigLike,
    ZeroweaveModel,
    autocasting,
    clip,
    refuse_other_device,
    settings_of,
)

AUTOCASTS: Final = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""What precisions of Lightning are for an engine; the others cast the model before."""
_PRECISIONS: Final = (*AUTOCASTS, "32-true", "bf16-true", "16-true", "64-true")
_REST, _ENGINE, _TAG = "lightning.ckpt", "zeroweave", "zeroweave_tag"


class ZeroweaveFabricStrategy(DDPStrategy):
    """Fabric's `DDPStrategy` for launching and for collectives, with an engine in the place of its wrapper.

    `config`: what `zeroweave.initialize` takes. `options`: those of `DDPStrategy` that are not for the wrapper.
    One model is trained, with one optimizer; others may be set up for evaluation.
    """

    def __init__(self, config: ConfigLike | None = None, **options: Any) -> None:
        super().__init__(**options)
        refuse_options(self._ddp_kwargs)
        self._backward_sync_control = _Sync()
        self._config = settings_of(config, "Fabric")
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine of the model that is trained. EngineError before `fabric.setup`."""
        if self._engine is None:
            raise EngineError("[ZW802] no model is trained yet: call fabric.setup(model, optimizer) first")
        return self._engine

    # ------------------------------------------------------------------ set up
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """A model and its optimizer become an engine. EngineError for a second of either. Collective."""
        if len(optimizers) != 1 or self._engine is not None:
            raise EngineError(
                "[ZW802] a second optimizer: a strategy trains one model with one optimizer; use one optimizer with "
                "several groups, or join the models in one torch.nn.Module; zeroweave.initialize itself takes a list"
            )
        self._engine = self._initialize(module, optimizers[0])
        return ZeroweaveModel(self._engine), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model for evaluation, sharded. Collective."""
        if next(module.parameters(), None) is None:
            return module
        return ZeroweaveModel(self._initialize(module, None))

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """EngineError: an optimizer is set up with its model."""
        raise EngineError(
            f"[ZW802] {type(optimizer).__name__} without its model: an engine is made of both; call "
            "fabric.setup(model, optimizer)"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: `initialize` moves it there, bucket by bucket."""

    def _initialize(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
        refuse_other_device(self.root_device)
        return initialize(module, optimizer, autocasting(self._config, precision_of(self.precision), AUTOCASTS))

    # ------------------------------------------------------------------ training
    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """The backward of the loss `tensor`, which is scaled where there is a loss scale. Collective.

        UnsupportedError for other arguments than `retain_graph`.
        """
        retain = kwargs.pop("retain_graph", None)
        if args or kwargs:
            raise UnsupportedError(
                f"fabric.backward() with {', '.join(kwargs) or 'a gradient'}: the engine takes retain_graph only"
            )
        self.precision.pre_backward(tensor, module)
        self.engine.backward(tensor, bool(retain), scale_wrt_gas=False)
        self.precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The optimizer step of the engine, after `closure` if there is one; returns what that did. Collective."""
        if optimizer is not self.engine.optimizer:
            raise EngineError(
                f"[ZW802] a step of {type(optimizer).__name__}, which fabric.setup was not given with the model"
            )
        if kwargs:
            raise UnsupportedError(f"optimizer.step({', '.join(kwargs)}=...): the engine's has a closure only")
        result = None if closure is None else closure()
        self.engine.step()
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scales the model's gradients to a global 2-norm of at most `max_norm`; returns the norm before. Collective.

        float32, 0-dim, on the strategy's device. NonFiniteError for a norm that is not finite, if asked for.
        """
        norm = clip(_set_up(module).engine, None, max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise NonFiniteError(
                f"the norm of the gradients is {float(norm)}: call fabric.strategy.engine.zero_grad() to go on without "
                "this step, or pass error_if_nonfinite=False to clip_gradients"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """UnsupportedError: gradients are sharded."""
        raise UnsupportedError("clip_gradients(clip_val=...): gradients are sharded over the ranks; use max_norm")

    # ------------------------------------------------------------------ checkpoints
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full tensors on the CPU of rank 0, `{}` on the others. Collective."""
        if isinstance(module, ZeroweaveModel):
            return module.engine.state_dict()
        return super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Takes rank 0's full state dict on all ranks. UnsupportedError unless `strict`. Collective."""
        if not isinstance(module, ZeroweaveModel):
            super().load_module_state_dict(module, state_dict, strict)
        elif not strict:
            raise UnsupportedError("load(strict=False) of a plain state dict: an engine takes whole ones only")
        else:
            module.engine.load_state_dict(state_dict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes the folder `path`: a checkpoint of the engine of `state`'s model, and the rest of `state`. Collective.

        EngineError unless there is one model in `state`, with its optimizer if it is trained.
        """
        if storage_options is not None or filter is not None:
            raise UnsupportedError("fabric.save(filter=...): a checkpoint of an engine has all of it")
        model, rest = _split(state)
        rest = self._convert_stateful_objects_in_state(rest, filter={})
        save_beside(model.engine, self.broadcast(path), rest, self.checkpoint_io.save_checkpoint)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Continues where `save_checkpoint` was called, at any stage and on any number of ranks; returns what is left.

        Files of other strategies, with full state dicts, are taken as well. Every byte of an engine's checkpoint is
        checked before anything changes. Collective.
        """
        if not is_beside(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        if not isinstance(state, dict) or not state:
            raise EngineError(f"{path} is a sharded checkpoint: call fabric.load(path, state) with the model in state")
        model, wanted = _split(state)

        def read(file: Path) -> dict[str, Any]:
            rest = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
            if missing := [key for key in wanted if key not in rest] if strict else []:
                raise KeyError(
                    f"[ZW603] {path} has no {', '.join(map(repr, missing))}, which the state asks for: strict=False"
                )
            return rest

        rest = load_beside(model.engine, path, read, strict)
        for key in wanted.keys() & rest.keys():
            value = rest.pop(key)
            if hasattr(wanted[key], "load_state_dict"):
                wanted[key].load_state_dict(value)
            else:
                state[key] = value
        return rest


class _Sync:
    """What `fabric.no_backward_sync` enters."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return _set_up(module).no_sync() if enabled else nullcontext()


def _set_up(module: nn.Module) -> ZeroweaveModel:
    if not isinstance(module, ZeroweaveModel):
        raise EngineError(f"[ZW802] {type(module).__name__} is not set up: call fabric.setup(model, optimizer) first")
    return module


def _split(state: Mapping[str, Any]) -> tuple[ZeroweaveModel, dict[str, Any]]:
    """The model in `state`, and all of `state` but it and its optimizer."""
    models = [value for value in state.values() if isinstance(value, ZeroweaveModel)]
    if len(models) != 1:
        raise EngineError(
            f"[ZW802] {len(models)} models in the state of a checkpoint: an engine's has one; save each apart"
        )
    optimizer = models[0].engine.optimizer
    if optimizer is not None and not any(value is optimizer for value in state.values()):
        raise EngineError(
            "[ZW802] the model without its optimizer in the state of a checkpoint: an engine has both; add it"
        )
    return models[0], {key: value for key, value in state.items() if value is not models[0] and value is not optimizer}


# ---------------------------------------------------------------------- what the Trainer's strategy uses as well
def precision_of(plugin: Any) -> str:
    """The precision of a plugin of Lightning. UnsupportedError for those that replace layers."""
    name = getattr(plugin, "precision", None)
    if name not in _PRECISIONS or type(plugin).__module__.split(".")[0] != "lightning":
        raise UnsupportedError(
            f"the precision plugin {type(plugin).__name__} with an engine: use one of {', '.join(_PRECISIONS)}"
        )
    return str(name)


def refuse_options(options: Mapping[str, Any]) -> None:
    """UnsupportedError for `options` that mean something to DistributedDataParallel alone."""
    if options:
        raise UnsupportedError(
            f"{', '.join(options)}: of DistributedDataParallel, which is not used here; leave it out"
        )


def save_beside(
    engine: Engine, path: str | Path, rest: Mapping[str, Any], write: Callable[[dict[str, Any], Path], None]
) -> None:
    """Makes the folder `path` of an engine's checkpoint and, on rank 0, a file of the `rest`, by `write`. Collective.

    The file is last and says which checkpoint belongs to it, so that a run that ends meanwhile leaves the earlier two
    together. CheckpointError where `path` is a file.
    """
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(
            f"[ZW604] {folder} is a file, and a sharded checkpoint a folder: remove it, or save elsewhere"
        )
    tag = engine.save(folder / _ENGINE)
    if engine.rank == 0:
        write({**rest, _TAG: tag}, folder / _REST)
        for earlier in (each for each in (folder / _ENGINE).iterdir() if each.is_dir()):
            if earlier.name != tag and not earlier.name.startswith("."):
                shutil.rmtree(earlier)


def load_beside(
    engine: Engine, path: str | Path, read: Callable[[Path], dict[str, Any]], strict: bool = True
) -> dict[str, Any]:
    """What `save_beside` had as the rest, read by `read`, when the engine has loaded its part. Collective."""
    rest = read(Path(path) / _REST)
    engine.load(Path(path) / _ENGINE, rest.pop(_TAG), strict=strict)
    return rest


def is_beside(path: str | Path) -> bool:
    """True if `save_beside` has made it."""
    return (Path(path) / _REST).is_file()
