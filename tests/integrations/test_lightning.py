"""What the strategies are called, what contradicts an engine, and that the snippets of docs/lightning.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import zeroweave as zw
from tests.support.commands import ROOT, run_code

pytest.importorskip("lightning")

from lightning import Trainer
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision

from zeroweave.integrations.lightning import ZeroweaveFabricStrategy, ZeroweaveStrategy
from zeroweave.integrations.lightning_fabric import precision_of

pytestmark = pytest.mark.matrix  # the library comes with `make matrix`

BOTH = pytest.mark.parametrize("made", [ZeroweaveFabricStrategy, ZeroweaveStrategy])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_strategies_have_names(stage: int) -> None:
    named = {"accelerator": "cpu", "devices": 1, "strategy": f"zeroweave_stage{stage}"}
    fabric, trainer = Fabric(**named).strategy, Trainer(**named, logger=False).strategy
    assert isinstance(fabric, ZeroweaveFabricStrategy) and isinstance(trainer, ZeroweaveStrategy)
    assert fabric._config == trainer._config == zw.Config(stage=stage)


@BOTH
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"find_unused_parameters": True}, zw.UnsupportedError, "find_unused_parameters: of DistributedDataParallel"),
        ({"config": {"gradient_accumulation_steps": 2}}, zw.ConfigError, "counts micro-steps"),
        ({"config": {"checkpoint": {"save_on_signal": "x"}}}, zw.ConfigError, "save_on_signal"),
        ({"config": {"stages": 2}}, zw.ConfigError, "did you mean 'stage'"),
    ],
)
def test_what_contradicts_an_engine(made: Any, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        made(**options)


def test_hooks_of_the_wrapper_are_refused() -> None:
    with pytest.raises(zw.UnsupportedError, match="ddp_comm_hook, model_averaging_period"):
        ZeroweaveStrategy(ddp_comm_hook=print, model_averaging_period=2)


def test_precisions_that_replace_layers_are_refused() -> None:
    class Eight(Precision):
        precision = "transformer-engine"

    with pytest.raises(zw.UnsupportedError, match="the precision plugin Eight"):
        precision_of(Eight())
    assert precision_of(Precision()) == "32-true"


def test_snippets_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "lightning.md").read_text()
    code = "\n".join(re.findall(r"^```py\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    ended, said = run_code(code.replace('{"stage": 3}', '{"stage": 3, "compile": {"enabled": False}}'), tmp_path, ROOT)
    assert code and ended == 0, said
