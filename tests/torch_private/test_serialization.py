"""Tensors that torch.save has written are rebuilt by the names that we know."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroweave.checkpoint.inert import Inert, load
from zeroweave.errors import CheckpointError


class Own(torch.Tensor):
    """Of a class that is not there where it is read."""


@pytest.mark.oldest
def test_tensors_of_all_kinds_come_back(tmp_path: Path) -> None:
    attributed = torch.arange(3.0)
    attributed.note = 7  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.arange(4.0).bfloat16())
    parameter.note = 7  # type: ignore[attr-defined]
    saved = {
        "plain": torch.arange(6).view(2, 3).t(),
        "parameter": nn.Parameter(torch.arange(4.0)),
        "with attributes": attributed,
        "parameter with attributes": parameter,
        "own": torch.arange(5.0).as_subclass(Own),
    }
    torch.save({**saved, "other": nn.ReLU(), "dtype": torch.float16, "shape": torch.Size([2])}, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    for name, value in saved.items():
        assert type(found[name]) in (torch.Tensor, nn.Parameter), name
        assert torch.equal(found[name], value.detach().as_subclass(torch.Tensor)) and found[name].dtype == value.dtype
    assert isinstance(found["other"], Inert) and found["dtype"] is torch.float16 and found["shape"] == (2,)


class Runs:
    """Leaves a file when it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.oldest
@pytest.mark.parametrize("how", ["torch.save", "before 1.6", "TorchScript", "pickle"])
def test_nothing_that_a_file_names_is_called(tmp_path: Path, how: str) -> None:
    file, ran = tmp_path / "file.pt", tmp_path / "ran"
    if how == "TorchScript":
        torch.jit.script(nn.ReLU()).save(str(file))
    elif how == "pickle":
        file.write_bytes(pickle.dumps(Runs(ran)))
    else:
        torch.save({"a": Runs(ran)}, file, _use_new_zipfile_serialization=how == "torch.save")
    if how == "torch.save":
        assert isinstance(load(file)["a"], Inert)
    else:
        with pytest.raises(CheckpointError, match=r"is no file of torch\.save"):
            load(file)
    assert not ran.exists()
