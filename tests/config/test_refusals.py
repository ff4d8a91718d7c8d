"""Errors name the key that is wrong and what is allowed, all of them at once."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from zeroweave.config import Config
from zeroweave.errors import ConfigError


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    found = re.fullmatch(r"\[ZW10[1-6]\] (.*)", str(caught.value), flags=re.DOTALL)
    assert found is not None, caught.value
    return found[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"precison": {}}, "unknown key 'precison' in the config; did you mean 'precision'?"),
        ({"Stage": 3}, "unknown key 'Stage' in the config; did you mean 'stage'?"),
        (
            {"precision": {"parms": "bfloat16"}},
            "unknown key 'precision.parms' in the config; did you mean 'precision.params'?",
        ),
        ({"prefetch": 2}, "unknown key 'prefetch' in the config; did you mean 'compile.prefetch'?"),
        (
            {"reduce": {"zzz": 1}},
            "unknown key 'reduce.zzz' in the config; the keys of 'reduce' are depth, op",
        ),
        (
            {"debug": {"sync_after_gather": True}},
            "unknown key 'debug.sync_after_gather' in the config; did you mean 'debug.sync_after_allgather'?",
        ),
        (
            {"check_every_step": True},
            "unknown key 'check_every_step' in the config; did you mean 'debug.check_every_step'?",
        ),
    ],
)
def test_an_unknown_key_suggests_the_nearest(source: dict[str, Any], message: str) -> None:
    assert refused(source) == message


def test_an_unknown_key_like_no_other_lists_what_exists() -> None:
    message = refused({"zzz": 1})
    assert message.startswith("unknown key 'zzz' in the config; the keys are ")
    assert all(key in message for key in Config.model_fields)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"stage": 4}, "stage must be 1, 2 or 3, not 4"),
        (
            {"experts": {"parallel_size": 2}},
            "experts.parallel_size is 2, but experts.parameters does not say which parameters are experts'; name them "
            'by patterns such as "*.experts.*"',
        ),
        (
            {"stage": 0},
            "stage must be 1, 2 or 3, not 0: every stage shards at least the optimizer's states; what shards nothing "
            "is torch.nn.parallel.DistributedDataParallel",
        ),
        ({"stage": "3"}, "stage must be 1, 2 or 3, not '3'"),
        ({"stage": True}, "stage must be 1, 2 or 3, not True"),
        ({"stage": None}, "stage must be 1, 2 or 3, not None"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be greater than or equal to 1, not 0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps must be a valid integer, not 1.5"),
        (
            {"gradient_accumulation_steps": True},
            "gradient_accumulation_steps must be a valid integer, not True",
        ),
        ({"gradient_clipping": 0}, "gradient_clipping must be greater than 0, not 0"),
        ({"gradient_clipping": math.inf}, "gradient_clipping must be a finite number, not inf"),
        ({"gradient_clipping": "1"}, "gradient_clipping must be a valid number, not '1'"),
        ({"gather_after_step": 1}, "gather_after_step must be a valid boolean, not 1"),
        ({"deadline_seconds": -1}, "deadline_seconds must be greater than 0, not -1"),
        (
            {"precision": {"params": "float64"}},
            "precision.params must be 'bfloat16', 'float16' or 'float32', not 'float64'",
        ),
        (
            {"precision": {"loss_scale": 1e-300}},
            "precision.loss_scale must be from 2**-126 to 2**127, as float32 has it, not 1e-300",
        ),
        (
            {"precision": {"initial_loss_scale": 1e300}},
            "precision.initial_loss_scale must be from 2**-126 to 2**127, as float32 has it, not 1e+300",
        ),
        (
            {"precision": {"loss_scale": 0}},
            "precision.loss_scale must be 'dynamic' or greater than 0, not 0",
        ),
        (
            {"precision": {"loss_scale": "static"}},
            "precision.loss_scale must be 'dynamic' or a valid number, not 'static'",
        ),
        (
            {"precision": {"loss_scale": 128, "loss_scale_window": 10, "min_loss_scale": 2}},
            "precision.loss_scale is the number 128, which never changes: leave out precision.loss_scale_window, "
            "precision.min_loss_scale, or set it to 'dynamic'",
        ),
        (
            {"precision": {"initial_loss_scale": 2, "min_loss_scale": 4}},
            "precision.initial_loss_scale must be at least precision.min_loss_scale (4), not 2",
        ),
        ({"on_nonfinite": "warn"}, "on_nonfinite must be 'skip' or 'raise', not 'warn'"),
        (
            {"precision": "bfloat16"},
            "precision must be a valid dictionary or instance of PrecisionConfig, not 'bfloat16'",
        ),
        ({"bucket": {"bytes": 0}}, "bucket.bytes must be greater than or equal to 1, not 0"),
        ({"debug": {"check_every_step": 1}}, "debug.check_every_step must be a valid boolean, not 1"),
        ({"reduce": {"op": "sum"}}, "reduce.op must be 'average' or 'predivide', not 'sum'"),
        ({"compile": {"recompile_limit": 0}}, "compile.recompile_limit must be greater than or equal to 1, not 0"),
        ({"compile": {"recompile_limit": 257}}, "compile.recompile_limit must be less than or equal to 256, not 257"),
        ({"compile": {"activation_budget": 1.5}}, "compile.activation_budget must be less than or equal to 1, not 1.5"),
        (
            {"compile": {"activation_budget": -0.1}},
            "compile.activation_budget must be greater than or equal to 0, not -0.1",
        ),
        ({"compile": {"prefetch": -1}}, "compile.prefetch must be 'auto' or greater than or equal to 0, not -1"),
        ({"compile": {"prefetch": True}}, "compile.prefetch must be 'auto' or a valid integer, not True"),
        (
            {"compile": {"keep": "some"}},
            "compile.keep must be 'auto', 'none' or 'all' or a valid tuple, not 'some'",
        ),
        (
            {"compile": {"memory_budget": -1}},
            "compile.memory_budget must be 'auto' or 'none' or greater than or equal to 0, not -1",
        ),
        ({"offload": {"optimizer": "some"}}, "offload.optimizer must be 'none', 'all' or 'adaptive', not 'some'"),
        ({"offload": {"params": 1}}, "offload.params must be a valid boolean, not 1"),
        (
            {"offload": {"optimizer": "adaptive", "memory_budget": -1}},
            "offload.memory_budget must be greater than or equal to 0, not -1",
        ),
        (
            {"offload": {"optimizer": "adaptive"}},
            "offload.optimizer is 'adaptive', which needs a limit: set offload.memory_budget to the bytes of device "
            "memory that may be used, or offload.optimizer to 'all'",
        ),
        (
            {"offload": {"optimizer": "all", "memory_budget": 1}},
            "offload.memory_budget is for offload.optimizer 'adaptive', not 'all': leave it out",
        ),
        (
            {"stage": 2, "offload": {"params": True}},
            "offload.params works with stage 3 only, not 2: stages 1 and 2 keep parameters gathered; set stage to 3, "
            "or use offload.optimizer",
        ),
        (
            {"compile": {"regions": "layers.*"}},
            "compile.regions must be 'auto' or a valid tuple, not 'layers.*'",
        ),
        (
            {"compile": {"regions": ["head", 1]}},
            "compile.regions must be 'auto' or a valid string, not ['head', 1]",
        ),
    ],
)
def test_a_wrong_value_names_the_key_and_what_is_allowed(source: dict[str, Any], message: str) -> None:
    assert refused(source) == message
    with pytest.raises(ConfigError):
        Config(**source)


def test_gather_after_step_is_refused_where_nothing_is_kept() -> None:
    assert "gather_after_step works with stages 1 and 2 only" in refused({"gather_after_step": True})
    assert Config(stage=1, gather_after_step=True).gather_after_step


def test_all_errors_are_named_at_once() -> None:
    assert refused({"stage": 7, "reduce": {"depth": 0}, "bukcet": {}}) == (
        "3 errors in the config:\n"
        "- stage must be 1, 2 or 3, not 7\n"
        "- reduce.depth must be greater than or equal to 1, not 0\n"
        "- unknown key 'bukcet' in the config; did you mean 'bucket'?"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.toml", None, "the config file cannot be read: No such file or directory"),
        ("config.yaml", "stage: 3", "the config file must end in .json or .toml"),
        ("config.json", "{'stage': 3}", "the config file is not valid JSON: "),
        ("config.toml", "stage 3", "the config file is not valid TOML: "),
        ("config.json", "[3]", "the config file must hold a table of keys, not a list"),
        ("config.toml", "stage = 4", "stage must be 1, 2 or 3, not 4"),
    ],
)
def test_files_that_do_not_work(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert refused(path).startswith(f"{path}: {message}")


def test_sources_that_are_no_config() -> None:
    assert "not int" in refused(3)
    assert "must be strings" in refused({1: 2})
