"""Where first values come from: files, a function, the modules themselves; and what happens where there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zeroweave.errors import ParameterError
from zeroweave.parameters.weights import Buffers, FileWeights, MadeWeights, weights_of


class Tied(nn.Module):
    """A tied weight, a parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 2))


class Rotary(nn.Module):
    """A buffer that only the constructor knows, as rotary embeddings of transformers have it."""

    def __init__(self, config: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("table", torch.arange(config) / 3, persistent=False)
        self.original = self.table


class Silent(nn.Module):
    """Initialises half of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.first)


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def write(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    placed = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def test_parts_of_files(tmp_path: Path) -> None:
    values = {"weight": torch.randn(5, 3), "bias": torch.randn(5)}
    write(tmp_path, {"a.safetensors": {"weight": values["weight"]}, "b.safetensors": {"bias": values["bias"]}})
    weights = FileWeights(tmp_path)
    weights.check(meta(lambda: nn.Linear(3, 5)))
    for name, value in values.items():
        flat = value.flatten()
        for start in range(flat.numel()):
            for numel in range(1, flat.numel() - start + 1):
                assert torch.equal(weights.part(name, start, numel), flat[start : start + numel])


def test_one_file_alone_and_in_a_folder(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(5, 3), "bias": torch.ones(5)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        weights = weights_of(nn.Linear(3, 5), path)
        assert isinstance(weights, FileWeights) and weights.part("bias", 1, 3).tolist() == [1.0] * 3


@pytest.mark.parametrize("stored", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_found_under_each_of_its_names(tmp_path: Path, stored: str) -> None:
    value, model = torch.randn(5, 3), meta(Tied)
    others = {"scale": torch.tensor(3.0), "none": torch.ones(0, 2)}
    save_file({stored: value, **others}, tmp_path / "model.safetensors")
    weights = FileWeights(tmp_path)
    weights.check(model)
    assert torch.equal(weights.part("embed.weight", 4, 7), value.flatten()[4:11])
    assert weights.part("scale", 0, 1).tolist() == [3.0]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 5), "more": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ParameterError, match=r"missing: bias; of another shape: weight: \[3, 5\] instead of \[5, 3\]"):
        weights_of(meta(lambda: nn.Linear(3, 5)), tmp_path)
    save_file(
        {"weight": torch.ones(5, 3), "bias": torch.ones(5), "more": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    with pytest.warns(UserWarning, match=r"no parameters for these weights in .*: more"):
        weights_of(nn.Linear(3, 5), tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no safetensors file"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "has several safetensors files"),
        ({"a.safetensors": b"no header"}, "cannot be read"),
        ({"model.safetensors.index.json": b"[]"}, "is no index"),
        ({"model.safetensors.index.json": b'{"weight_map": {"weight": "../x", "bias": "../x"}}'}, "cannot be read"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path: Path, files: dict[str, bytes], reason: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ParameterError, match=reason):
        weights_of(nn.Linear(3, 5), folder)


def test_modules_initialise_themselves() -> None:
    model, usual = meta(lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))), nn.Linear(3, 5)
    weights = weights_of(model, None)
    torch.manual_seed(1)
    usual.reset_parameters()
    torch.manual_seed(1)
    assert torch.equal(weights.whole("0.weight"), usual.weight) and torch.equal(weights.whole("0.bias"), usual.bias)
    assert weights.whole("1.weight").tolist() == [1.0] * 5
    assert all(p.is_meta for p in model.parameters())  # the model itself is as it was


def test_values_that_are_there_stay() -> None:
    model = nn.Linear(3, 5)
    model.bias = nn.Parameter(torch.empty(5, device="meta"))
    weights = weights_of(model, None)
    assert weights.whole("weight") is model.weight and weights.whole("bias").shape == (5,)


def test_a_function_fills_by_name() -> None:
    weights = weights_of(nn.Linear(3, 5), lambda name, tensor: tensor.fill_(len(name)))
    assert weights.whole("weight").unique().tolist() == [6.0] and weights.whole("bias").unique().tolist() == [4.0]


def test_what_nobody_sets_is_an_error() -> None:
    with pytest.raises(ParameterError, match="Silent has left values of 'second' unset"):
        weights_of(meta(Silent), None).whole("second")
    with pytest.raises(ParameterError, match="the function `weights` has left values of 'first' unset"):
        weights_of(meta(Silent), lambda name, tensor: None).whole("first")
    with pytest.raises(ParameterError, match="'scale', 'none': on the meta device, in modules without reset"):
        weights_of(meta(Tied), None)


def test_buffers_are_made_again_or_read(tmp_path: Path) -> None:
    model = meta(lambda: nn.Sequential(Rotary(4), nn.BatchNorm1d(3)))
    norm = nn.BatchNorm1d(3)
    save_file({f"1.{name}": t + 1 for name, t in norm.state_dict().items()}, tmp_path / "model.safetensors")
    weights = weights_of(model, tmp_path)
    Buffers(model, weights).give()
    assert torch.equal(model[0].table, torch.arange(4) / 3) and model[0].original.tolist() == model[0].table.tolist()
    assert model[1].running_var.tolist() == [2.0] * 3
    with pytest.raises(ParameterError, match="'running_mean', 'running_var', 'num_batches_tracked': buffers"):
        Buffers(meta(lambda: nn.BatchNorm1d(3)), MadeWeights(nn.Linear(1, 1)))
