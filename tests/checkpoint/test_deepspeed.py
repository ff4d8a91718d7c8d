"""DeepSpeed's ZeRO checkpoints, laid out as its version 0.19 has written them, become ours."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.marks import daily
from zeroweave.checkpoint.deepspeed import convert, read

STEPS = 3.0


class ZeroStageEnum(IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    cur_scale = 8.0

    def __init__(self) -> None:
        self.cur_scale = 8.0


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While files are written there are its classes; while they are read there are none."""
    module = types.ModuleType("deepspeed_as_it_writes")
    for kind in (ZeroStageEnum, LossScaler):
        monkeypatch.setattr(kind, "__module__", module.__name__)
        setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module
    yield
    sys.modules.pop(module.__name__, None)


class Net(nn.Module):
    """Sizes that ranks share unevenly, in two groups; a frozen parameter and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 9)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def groups_of(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [{n: p for n, p in trained.items() if (p.ndim > 1) == matrices} for matrices in (True, False)]


KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def values_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """What a run has made of the trained parameters: masters and moments."""
    torch.manual_seed(7)
    return {
        name: {key: torch.randn(p.shape) for key in KEYS} for group in groups_of(model) for name, p in group.items()
    }


def write(folder: Path, model: nn.Module, stage: int, world: int, kind: str = "") -> None:
    """As `save_checkpoint` does.

    `kind`: "bf16", which the files' names tell; "BF16_Optimizer", which is another layout; "aligned", with gaps between
    parameters; "FusedAdam", an optimizer of DeepSpeed's own.
    """
    values, groups, state = values_of(model), groups_of(model), model.state_dict()
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(value["fp32"])
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    options: list[dict[str, Any]] = [{"lr": lr, "betas": (0.9, 0.99), "params": [n]} for n, lr in enumerate((0.1, 0.2))]
    step: Any = torch.tensor(STEPS)
    if kind == "FusedAdam":
        step, options = int(STEPS), [{**group, "step": 0, "bias_correction": True} for group in options]
    gaps = [[-p.numel() % 4 if kind == "aligned" else 0 for p in group.values()] for group in groups]
    prefix = "bf16_" if kind.lower().startswith("bf16") else ""
    for rank in range(world):
        flats: list[dict[str, torch.Tensor]] = []
        for group, after in zip(groups, gaps, strict=True):
            if stage == 3:
                cut = {name: -(-p.numel() // world) for name, p in group.items()}
                pieces = {
                    key: [padded(values[n][key], c * world)[rank * c :][:c] for n, c in cut.items()] for key in KEYS
                }
                flats.append({key: torch.cat(each) for key, each in pieces.items()})
                continue
            sizes = [p.numel() + gap for p, gap in zip(group.values(), after, strict=True)]
            whole = sum(sizes)
            size = -(-whole // (2 * world)) * 2
            joined = {
                key: torch.cat([padded(values[n][key], numel) for n, numel in zip(group, sizes, strict=True)])
                for key in KEYS
            }
            flats.append({key: padded(each, size * world)[rank * size :][:size] for key, each in joined.items()})
            if kind != "BF16_Optimizer":
                flats[-1]["fp32"] = flats[-1]["fp32"][: max(0, whole - rank * size)]
        held = {index: {"step": step, **{key: flat[key] for key in KEYS[1:]}} for index, flat in enumerate(flats)}
        base = {"state": held, "param_groups": options}
        masters = [flat["fp32"] for flat in flats]
        own: dict[str, Any] = {"loss_scaler": LossScaler(), "zero_stage": ZeroStageEnum(stage)}
        if stage == 3:
            own |= {"optimizer_state_dict": base, "fp32_flat_groups": masters}
        elif kind == "BF16_Optimizer":
            own = {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
        else:
            own |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
            own |= {"param_alignment_paddings": gaps}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": own}, folder / "global_step3" / f"{prefix}{name}_optim_states.pt")
        each_has = -(-3 // world)
        frozen = padded(model.get_parameter("frozen"), each_has * world)
        told = {
            "module": {n: v.new_empty(0) if stage == 3 and n not in buffers(model) else v for n, v in state.items()},
            "buffer_names": list(buffers(model)),
            "param_shapes": [{n: p.shape for n, p in group.items()} for group in groups],
            "frozen_param_shapes": {"frozen": torch.Size([3])} if stage > 1 else None,
            "frozen_param_fragments": {"frozen": frozen[rank * each_has :][:each_has]} if stage > 1 else None,
            "shared_params": {},
            "lr_scheduler": {"last_epoch": 3},
            "skipped_steps": 1,
            "global_steps": 4,
            "dp_world_size": world,
            "ds_config": {"gradient_accumulation_steps": 2},
            "note": {"average": torch.arange(2048.0).view(2, -1).T},
            "args": LossScaler(),
        }
        file = f"{name}_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(told, folder / "global_step3" / file)


def padded(value: torch.Tensor, numel: int) -> torch.Tensor:
    flat = value.detach().flatten()
    return torch.cat([flat, torch.full((numel - flat.numel(),), 99.0)])


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


@daily(
    ("stage", "world", "kind"),
    [(1, 2, ""), (2, 3, "aligned"), (3, 2, "bf16"), (3, 4, ""), (1, 2, "BF16_Optimizer"), (2, 1, "FusedAdam")],
    [(1, 1, "aligned"), (2, 3, ""), (2, 2, "bf16"), (3, 3, "FusedAdam"), (1, 5, "BF16_Optimizer"), (1, 8, "")],
)
def test_an_engine_goes_on_where_deepspeed_stopped(tmp_path: Path, stage: int, world: int, kind: str) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, frozen = values_of(model), model.frozen.detach().clone()
    model.norm.running_mean.fill_(3.0)
    write(tmp_path / "ds", model, stage, world, kind)
    del sys.modules["deepspeed_as_it_writes"]
    told = convert(tmp_path / "ds", tmp_path / "out", "AdamW")
    assert told.endswith("without args, lr_scheduler")
    torch.manual_seed(1)
    other = Net()
    optimizer = torch.optim.AdamW([{"params": list(group.values())} for group in groups_of(other)])
    with zw.initialize(other, optimizer, {"compile": {"enabled": False}}) as engine:
        client = engine.load(tmp_path / "out")
        assert [*client] == ["note"] and torch.equal(client["note"]["average"], torch.arange(2048.0).view(2, -1).T)
        assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (3, 1, 8)
        for name, held in expected.items():
            for key, value in held.items():
                found = engine.full(name, "param" if key == "fp32" else key)
                assert found is not None and torch.equal(found, value), (name, key)
            step = engine.full(name, "step")
            assert step is not None and step.item() == STEPS
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        assert not {"step", "bias_correction"} & optimizer.param_groups[0].keys()
        assert engine.loss_scale == 1.0 and (other.norm.running_mean == 3.0).all()
        engine.train_step(torch.ones(3, 7), lambda output, _: output.square().mean())
        assert torch.equal(engine.full("a.weight", "step"), torch.tensor(STEPS + 1))
    assert torch.equal(other.frozen, frozen)


def spoilt(folder: Path, how: str) -> None:
    files = folder / "global_step3"
    first = files / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(first, weights_only=False)
    own = content["optimizer_state_dict"]
    match how:
        case "a rank":
            (files / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        case "a gap":
            (files / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(
                files / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
            )
        case "another parallelism":
            first.rename(files / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
        case "two":
            torch.save(content, files / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
        case "without correction":
            base = own.get("base_optimizer_state", own.get("optimizer_state_dict"))
            base["param_groups"][1]["bias_correction"] = False
            torch.save(content, first)
        case "elements":
            key = "fp32_flat_groups" if "fp32_flat_groups" in own else "single_partition_of_fp32_groups"
            own[key][0] = own[key][0][:-4]
            torch.save(content, first)
        case "a key":
            own.pop("loss_scaler")
            torch.save(content, first)
        case "masters elsewhere":
            own["single_partition_of_fp32_groups"][1] = own["single_partition_of_fp32_groups"][1].roll(1)
            torch.save(content, first)
        case "no options":
            own["base_optimizer_state"] = list(own["base_optimizer_state"]["state"].values())
            torch.save(content, first)


NOT_WHOLE = {
    "a rank": "files of 1 ranks, and 2 wrote it",
    "a gap": r"files of the ranks \[0, 2\]",
    "another parallelism": "of tensor, pipeline or expert parallelism",
    "two": "files of two checkpoints: .*zero_pp_rank_0_mp_rank_00",
    "without correction": "without bias_correction, which AdamW cannot",
    "elements": "elements",
    "a key": "unknown way: KeyError: 'loss_scaler'",
}
AT_STAGE_2 = {
    "masters elsewhere": r"the master of a\.bias is not that of the model's weight",
    "no options": "elastic_checkpoint",
}


@pytest.mark.parametrize(
    ("how", "stage"), [*((how, stage) for how in NOT_WHOLE for stage in (2, 3)), *((how, 2) for how in AT_STAGE_2)]
)
def test_what_is_not_whole_is_refused(tmp_path: Path, stage: int, how: str) -> None:
    write(tmp_path / "ds", Net(), stage, 2)
    spoilt(tmp_path / "ds", how)
    with pytest.raises(zw.CheckpointError, match=(NOT_WHOLE | AT_STAGE_2)[how]):
        convert(tmp_path / "ds", tmp_path / "out", "AdamW")
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("tag", ["../other", "/etc", "..", ".", "", "a/b"])
def test_latest_names_a_folder_beside_it(tmp_path: Path, tag: str) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(zw.CheckpointError, match="no folder beside it"):
        read(tmp_path, "AdamW")
