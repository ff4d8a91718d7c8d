"""Families of transformers' models train as under plain PyTorch."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from benchmarks import families

pytestmark = pytest.mark.matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3", "t5", "gptoss"])
def test_a_family_trains_as_under_plain_pytorch(family: str) -> None:
    pytest.importorskip("transformers")
    words = {"lengths", "mask"}
    found, stats = families.engine(family, words, 6, CPU, False, "aot_eager")
    assert families.apart(found, families.plain(family, words, 6, CPU)) < 1e-4
    assert stats.compiled_calls > 0


def test_a_saved_view_lies_in_another_way_than_it_was_traced() -> None:
    """The forward of a masked Mamba 2 saves a view of a larger tensor, which Inductor lays out densely."""
    pytest.importorskip("transformers")
    config, model, settings = families.FAMILIES["mamba2"]
    small = {**settings, "num_hidden_layers": 1}
    with patch.dict(families.FAMILIES, {"mamba2": (config, model, small)}):
        found, _ = families.engine("mamba2", {"mask"}, 2, CPU, False, "inductor")
        assert families.apart(found, families.plain("mamba2", {"mask"}, 2, CPU)) < 1e-4
