"""Programs for Lightning and Fabric under an engine train what they train with `DDPStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.support.harness import Pools

pytest.importorskip("lightning")

from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixed
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, TorchCheckpointIO
from torch.utils.data import DataLoader

from tests.distributed.integrations import lightnings as runs

pytestmark = pytest.mark.matrix  # the library comes with `make matrix`


def run(kind: str, strategy: Any, folder: Path, **more: Any) -> dict[str, Any]:
    if kind == "fabric":
        return runs.looped(strategy, **more)
    if kind == "manual":
        return runs.fitted(strategy, folder, **more, module={"manual": True})
    clipped = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    return runs.fitted(strategy, folder, **{**clipped, **more})


def distance(kind: str, stage: int, mode: str, folder: Path, scale: float | None = None, **more: Any) -> dict[str, Any]:
    """How far a run of 20 steps is from that of `DDPStrategy`. `scale`: of losses, in zeroweave's config."""
    expected = run(kind, runs.plain(kind), folder, **more)
    strategy = runs.strategies(kind, stage, mode, precision={"loss_scale": scale})
    found = run(kind, strategy, folder, **more)
    weights = [float((value - expected["weights"][name]).abs().max()) for name, value in found["weights"].items()]
    rest = [*zip(found["losses"], expected["losses"], strict=True)]
    rest += zip(found.get("norms", ()), expected.get("norms", ()), strict=True)
    rest += zip(found.get("seen", ()), expected.get("seen", ()), strict=True)
    return {
        "names": list(found["weights"]) == list(expected["weights"]),
        "weights": max(weights, default=0.0),
        "rest": max(abs(a - b) for a, b in rest),
        "lr": found.get("lr") == expected.get("lr"),
        "compiled": found["compiled"] > 0,
        "scale": found["scale"],
        "trained": expected["losses"][0] > 1.2 * expected["losses"][-1],
    }


MODES = ("eager", "aot_eager")
ROWS = [(kind, stage, mode) for kind in ("fabric", "trainer", "manual") for stage in (1, 2, 3) for mode in MODES]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "stage", "mode"), ROWS)
def test_a_program_trains_what_it_trains_with_ddp(
    pools: Pools, tmp_path: Path, kind: str, stage: int, mode: str
) -> None:
    for rank, told in enumerate(pools(2).run(distance, kind, stage, mode, tmp_path)):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5 and told["lr"] and told["trained"], told
        assert told["names"] == (rank == 0)
        assert told["compiled"] == (mode != "eager")  # of "manual" only the validation


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "stage"), [("fabric", 3), ("trainer", 3), ("trainer", 1), ("fabric", 2)])
def test_mixed_precision(pools: Pools, tmp_path: Path, kind: str, stage: int) -> None:
    for told in pools(2).run(mixed, kind, stage, tmp_path):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5 and told["differs"], told


def mixed(kind: str, stage: int, folder: Path) -> dict[str, Any]:
    whole = run(kind, runs.plain(kind), folder)["losses"]
    narrow = run(kind, runs.strategies(kind, stage), folder, precision="bf16-mixed")["losses"]
    told = distance(kind, stage, "eager", folder, precision="bf16-mixed")
    return {**told, "differs": max(abs(a - b) for a, b in zip(whole, narrow, strict=True)) > 1e-4}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "stage"), [("fabric", 3), ("trainer", 3), ("manual", 2), ("fabric", 1), ("trainer", 1)]
)
def test_losses_are_scaled_and_gradients_unscaled_once(pools: Pools, tmp_path: Path, kind: str, stage: int) -> None:
    """A loss scale changes nothing, neither weights nor the norms that clipping returns."""
    for told in pools(2).run(distance, kind, stage, "eager", tmp_path, 1024.0):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5, told


def half(kind: str, stage: int, folder: Path) -> tuple[dict[str, Any], float]:
    """float16, for which Lightning has a GradScaler. Also the engine's loss scale."""
    plugin = FabricMixed if kind == "fabric" else MixedPrecision
    told = distance(kind, stage, "eager", folder, plugins=[plugin("16-mixed", "cpu")])
    return told, told["scale"]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "stage"), [("fabric", 3), ("trainer", 3), ("fabric", 1), ("trainer", 2)])
def test_float16_with_a_dynamic_loss_scale(pools: Pools, tmp_path: Path, kind: str, stage: int) -> None:
    """Of the Trainer's runs the first step overflows, and is skipped by both."""
    for told, scale in pools(2).run(half, kind, stage, tmp_path):
        assert told["weights"] <= 1e-6 and told["rest"] <= 1e-5, told
        assert scale == (65536.0 if kind == "fabric" else 32768.0)


# ---------------------------------------------------------------------- save and resume
EPOCHS = {"limit_train_batches": 4, "max_epochs": 5, "max_steps": -1}


def stopped_and_not(kind: str, stages: tuple[int, int], folder: Path) -> dict[str, bool]:
    """A run that saved and went on, and one that loaded it, at another stage perhaps."""
    first, second = (runs.strategies(kind, stage) for stage in stages)
    accumulate = 2 if stages[0] == stages[1] else 1  # stages add up in orders of their own
    if kind == "fabric":
        both: dict[str, Any] = {"dropout": 0.2, "accumulate": accumulate}
        expected = runs.looped(first, save=folder / "saved", **both)
        found = runs.looped(second, load=folder / "saved", **both)
    else:
        more = {"gradient_clip_val": 0.3, "accumulate_grad_batches": accumulate, "module": {"dropout": 0.2}, **EPOCHS}
        expected = runs.fitted(first, folder, save=folder / "saved", **more)
        found = runs.fitted(second, folder, load=folder / "saved" / "epoch=2.ckpt", **more)
    return {
        "weights": all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items()),
        "losses": found["losses"] == expected["losses"][-len(found["losses"]) :],
        "fewer": 0 < len(found["losses"]) < len(expected["losses"]),
        "lr": found.get("lr") == expected.get("lr"),
    }


RESUMED = [(kind, stages) for kind in ("fabric", "trainer") for stages in ((3, 3), (1, 1), (2, 2), (3, 1), (1, 2))]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "stages"), RESUMED)
def test_a_run_goes_on_bit_by_bit(pools: Pools, tmp_path: Path, kind: str, stages: tuple[int, int]) -> None:
    """Dropout, schedules and callbacks included."""
    for told in pools(2).run(stopped_and_not, kind, stages, tmp_path):
        assert all(told.values()), told


def overwritten(folder: Path) -> list[Any]:
    """Saves to one place: what a save that dies leaves behind, and what one that ends does."""
    with runs.environment():
        module, keeping = runs.Module(), runs.Keeping()
        fit = runs.trainer(runs.strategies("trainer", 3), folder, keeping, max_steps=2)
        fit.fit(module, *runs.loaders())
        engine, place = fit.strategy.engine, folder / "last.ckpt"
        fit.save_checkpoint(place)
        first = dict(engine.state_dict())
        engine.train_step(torch.ones(2, runs.WIDTH), lambda output, _: output.square().mean())
        engine.save(place / "zeroweave")  # all that a run has saved which ends before it has written the rest
        fit.strategy.load_checkpoint(place)
        told: list[Any] = [torch.equal(value, first[name]) for name, value in engine.state_dict().items()]
        engine.train_step(torch.ones(2, runs.WIDTH), lambda output, _: output.square().mean())
        fit.save_checkpoint(place)
        fit.strategy.checkpoint_io = AsyncCheckpointIO()
        with pytest.raises(zw.UnsupportedError, match="AsyncCheckpointIO"):
            fit.save_checkpoint(place)
        fit.strategy.checkpoint_io = TorchCheckpointIO()
        (folder / "file.ckpt").touch()
        with pytest.raises(zw.CheckpointError, match="is a file, and a sharded checkpoint a folder"):
            fit.save_checkpoint(folder / "file.ckpt")
        return [*told, len(list((place / "zeroweave").glob("step-*")))]


@pytest.mark.matrix
def test_a_place_that_is_saved_to_again(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(overwritten, tmp_path) == [[True] * 10 + [1], [1]]


def to_and_from_ddp(kind: str, folder: Path) -> list[float]:
    """A file of full state dicts is loaded by either strategy, and by both to the same end."""
    ends = []
    if kind == "fabric":
        runs.looped(runs.plain(kind), save=folder / "plain.ckpt")
        for strategy in (runs.plain(kind), runs.strategies(kind, 3)):
            ends.append(runs.looped(strategy, load=folder / "plain.ckpt")["weights"])
    else:
        runs.fitted(runs.plain(kind), folder, save=folder / "saved", **EPOCHS)
        for strategy in (runs.plain(kind), runs.strategies(kind, 3)):
            ends.append(runs.fitted(strategy, folder, load=folder / "saved" / "epoch=2.ckpt", **EPOCHS)["weights"])
    return [float((value - ends[0][name]).abs().max()) for name, value in ends[1].items()]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["fabric", "trainer"])
def test_checkpoints_of_ddp_are_gone_on_from(pools: Pools, tmp_path: Path, kind: str) -> None:
    found = pools(2).run(to_and_from_ddp, kind, tmp_path)[0]
    assert len(found) == 10 and max(found) <= 1e-6


def whole_life(folder: Path) -> list[Any]:
    """Validation, a fit, tests of it and of a checkpoint, another fit, and the module as it was before."""
    with runs.environment():
        module, keeping = runs.Module(), runs.Keeping()
        trainer = runs.trainer(runs.strategies("trainer", 3), folder, keeping, max_steps=3, num_sanity_val_steps=0)
        train, validation = runs.loaders()
        trainer.validate(module, validation, verbose=False)
        untrained = module.seen[-2:]
        trainer.fit(module, train)
        trainer.save_checkpoint(folder / "three.ckpt")
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        trained = dict(keeping.weights)
        trainer.test(module, validation, verbose=False)
        first = module.seen[-2:]
        told: list[Any] = [module.seen[-4:-2] == untrained, first != untrained, len(module.losses)]
        trainer.fit_loop.epoch_loop.max_steps = 5
        trainer.fit(module, train)
        told += [len(module.losses), trainer.strategy.engine.global_steps]
        trainer.test(module, validation, ckpt_path=str(folder / "three.ckpt"), verbose=False)
        told += [module.seen[-2:] == first]
        trainer.strategy.engine.destroy()
        plain = runs.Module()
        plain.load_state_dict(torch.load(folder / "weights.ckpt")["state_dict"])
        same = [torch.equal(value, plain.state_dict()[name]) for name, value in trained.items()]
        same += [torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items()]
        again = runs.trainer("ddp", folder, runs.Keeping())
        other = runs.Module()
        again.test(other, validation, ckpt_path=str(folder / "weights.ckpt"), verbose=False)
        return [*told, other.seen == first, all(same)]


@pytest.mark.matrix
def test_a_trainer_evaluates_fits_again_and_gives_the_module_back(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(whole_life, tmp_path) == [[True, True, 3, 5, 2, True, True, True]] * 2


def predicted(folder: Path, stage: int) -> list[Any]:
    """Of two loaders, in which ranks have other numbers of batches; beside `DDPStrategy`."""

    class Predicting(runs.Module):
        def predict_step(self, batch: torch.Tensor, index: int, dataloader_idx: int = 0) -> torch.Tensor:
            return self.net(batch)

    loaders = [DataLoader(runs.rows()[:count], batch_size=2) for count in (9, 5)]
    with runs.environment():
        found = [
            runs.trainer(strategy, folder).predict(Predicting(), loaders)
            for strategy in ("ddp", runs.strategies("trainer", stage))
        ]
    return [[[batch.tolist() for batch in loader] for loader in loaders] for loaders in found]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_have_fewer_batches_to_predict(pools: Pools, tmp_path: Path, stage: int) -> None:
    ranks = pools(2).run(predicted, tmp_path, stage)
    assert [[len(loader) for loader in found] for found, _ in ranks] == [[3, 2], [2, 1]]
    for expected, found in ranks:
        for batch, other in zip(chain(*expected), chain(*found), strict=True):
            assert torch.allclose(torch.tensor(batch), torch.tensor(other), atol=1e-6)


def compiled_by_the_program() -> int:
    with runs.environment():
        fabric = Fabric(accelerator="cpu", devices=runs.world(), strategy=runs.strategies("fabric", 3, "aot_eager"))
        fabric.launch()
        net = runs.Net(0.0)
        sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = fabric.setup(torch.compile(net), sgd)
        fabric.backward(model(torch.ones(2, runs.WIDTH)).square().mean())
        optimizer.step()
        return int(fabric.strategy.engine.stats.compiled_calls)


@pytest.mark.matrix
def test_a_model_that_the_program_compiles_is_compiled_by_the_engine(pools: Pools) -> None:
    assert min(pools(2).run(compiled_by_the_program)) > 0


def refused_by_the_trainer(folder: Path) -> list[str]:
    def fit(module: LightningModule | None = None, **more: Any) -> str:
        strategy = more.pop("strategy", None) or runs.strategies("trainer", 3)
        with runs.environment(), pytest.raises(zw.ZeroweaveError) as refused:
            runs.trainer(strategy, folder, runs.Keeping(), **more).fit(module or runs.Module(), *runs.loaders())
        return str(refused.value)

    class Two(runs.Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    class Looking(runs.Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.net.leave.weight.grad.norm()

    return [
        fit(gradient_clip_val=1.0, gradient_clip_algorithm="value"),
        fit(sync_batchnorm=True),
        fit(Two(manual=True)),
        fit(Looking()),
        fit(strategy=runs.strategies("trainer", 3, precision={"params": "bfloat16"}), precision="bf16-mixed"),
    ]


SAID = [
    "gradients are sharded over the ranks",
    "batch statistics are each rank's own",
    "gives 2 optimizers: the Trainer steps one",
    "engine.clip_grad_norm_()",
    "precision.params in zeroweave's config beside precision 'bf16-mixed'",
]


@pytest.mark.matrix
def test_what_the_trainer_refuses(pools: Pools, tmp_path: Path) -> None:
    for messages in pools(2).run(refused_by_the_trainer, tmp_path):
        assert [part in message for part, message in zip(SAID, messages, strict=True)] == [True] * len(SAID), messages


def refused_by_fabric(folder: Path) -> list[str]:
    told = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises((zw.ZeroweaveError, KeyError)) as error:
            call()
        told.append(str(error.value))

    with runs.environment():
        fabric = Fabric(accelerator="cpu", devices=runs.world(), strategy=runs.strategies("fabric", 3))
        fabric.launch()
        net = runs.Net(0.0)
        sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        refused(lambda: fabric.setup_optimizers(sgd))
        refused(lambda: fabric.setup(net, sgd, sgd))
        refused(lambda: fabric.strategy.engine)
        model, optimizer = fabric.setup(net, sgd)
        frozen = fabric.setup(runs.Net(0.0).requires_grad_(False))
        with torch.no_grad():
            assert frozen(torch.ones(1, runs.WIDTH)).shape == (1, runs.WIDTH)
        other = runs.Net(0.0)
        refused(lambda: fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1)))
        fabric.backward(model(torch.ones(2, runs.WIDTH)).square().mean())
        refused(lambda: fabric.clip_gradients(model, optimizer, clip_val=1.0))
        refused(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1))
        refused(optimizer.zero_grad)
        assert optimizer.step(lambda: 3.0) == 3.0
        refused(lambda: fabric.backward(model(torch.ones(2, runs.WIDTH)).square().mean(), create_graph=True))
        fabric.backward(model(torch.full((2, runs.WIDTH), float("inf"))).square().mean())
        refused(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
        fabric.strategy.engine.zero_grad()
        refused(lambda: fabric.save(folder / "a", {"model": model}))
        refused(lambda: fabric.save(folder / "a", {"optimizer": optimizer}))
        state = {"model": model, "optimizer": optimizer}
        refused(lambda: fabric.save(folder / "a", state, filter={"model": lambda *_: True}))
        fabric.save(folder / "a", state)
        refused(lambda: fabric.load(folder / "a"))
        refused(lambda: fabric.load(folder / "a", {**state, "epoch": 0}))
        assert fabric.load(folder / "a", {**state, "epoch": 0}, strict=False) == {}
        weights = fabric.strategy.get_module_state_dict(model._forward_module)
        if fabric.is_global_zero:
            torch.save(weights, folder / "raw.pt")
        fabric.barrier()
        fabric.load_raw(folder / "raw.pt", model)
    return told


TOLD = [
    "SGD without its model",
    "a second optimizer",
    "no model is trained yet",
    "a second optimizer",
    "use max_norm",
    "the engine has the 2-norm only",
    "its gradients are kept by the engine",
    "with create_graph",
    "the norm of the gradients is",
    "the model without its optimizer",
    "0 models in the state",
    "a checkpoint of an engine has all of it",
    "is a sharded checkpoint: call fabric.load(path, state)",
    "has no 'epoch'",
]


@pytest.mark.matrix
def test_what_fabric_refuses(pools: Pools, tmp_path: Path) -> None:
    for messages in pools(2).run(refused_by_fabric, tmp_path):
        assert [part in message for part, message in zip(TOLD, messages, strict=True)] == [True] * len(TOLD), messages
