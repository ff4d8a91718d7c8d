"""Files of torch.save: their tensors come back, and nothing that they name is called."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.small import Runs
from zeroweave.checkpoint.torch_save import Inert, load
from zeroweave.errors import CheckpointError


class Fields(dict[str, int]):
    """A class that is not known where the file is read."""


@pytest.mark.oldest
def test_tensors_of_all_kinds_come_back(tmp_path: Path) -> None:
    attributed, parameter = torch.arange(3.0), nn.Parameter(torch.arange(4.0).bfloat16())
    attributed.note = parameter.note = 7  # type: ignore[attr-defined]
    saved = {
        "plain": torch.arange(6).view(2, 3).t(),
        "parameter": nn.Parameter(torch.arange(4.0)),
        "with attributes": attributed,
        "parameter with attributes": parameter,
    }
    counts = defaultdict(list, a=[1])
    others = {"other": nn.ReLU(), "counts": counts, "dtype": torch.float16, "shape": torch.Size([2])}
    torch.save({**saved, **others, "ordered": OrderedDict(a=(1, [None]))}, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    for name, value in saved.items():
        assert torch.equal(found[name], value.detach()) and found[name].dtype == value.dtype, name
    assert isinstance(found["other"], Inert) and found["counts"] == {"a": [1]}
    assert found["dtype"] is torch.float16 and found["shape"] == (2,) and found["ordered"] == {"a": (1, [None])}


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
        assert load(file)["a"].arguments == (str(ran), "w")
    else:
        with pytest.raises(CheckpointError, match=r"is no file of torch\.save"):
            load(file)
    assert not ran.exists()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    torch.save({"a": Fields(a=1)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"file\.pt is no file .*UnpicklingError: Can only SETITEM for dict"):
        load(tmp_path / "file.pt")
