"""Plans of a small model: what grows and shrinks with ranks and stages, what is advised, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.marks import slow
from zeroweave import cli
from zeroweave.config import Config
from zeroweave.eager import chunked_loss
from zeroweave.errors import EngineError
from zeroweave.plan.hardware import GPUS, Calibration, Efficiency, Hardware
from zeroweave.plan.model import source_of
from zeroweave.plan.plan import Plans, Row, advise, config_of, lines, make
from zeroweave.plan.rank import PlannedRank
from zeroweave.schedule import simulate

HARDWARE = Hardware(GPUS["h200"], Efficiency())
ROW = Row(3, 2, "auto", 1.0, 0.1, 10, 20, 5, 7, 30, peak=100, fits=True)


def rank(function: str, **settings: object) -> PlannedRank:
    model, batch = source_of(f"tests.plan.models:{function}", 1, 8)()
    config = Config.load({"stage": 3, "compile": {"enabled": False}, **settings})
    return PlannedRank(model, batch, torch.optim.AdamW, config, 2, HARDWARE)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload": {"optimizer": "all"}},
        {"offload": {"params": True}},
        {"offload": {"activations": True, "activations_threshold_bytes": 64}},
        {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
    ],
    ids=["plain", "optimizer", "params", "activations", "accumulation"],
)
def test_the_step_that_follows_a_plan_takes_what_the_plan_says(settings: dict[str, object]) -> None:
    """The simulator and the rank itself, which carries the schedule out, come to the same time."""
    found = rank("llama", **settings).measure()
    assert simulate(found.first, found.costs).seconds == pytest.approx(found.step.seconds, rel=0.02)


@slow("True")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_has_every_product_of_the_model(compiled: bool) -> None:
    """Three for each linear layer, those that a compiled backward writes into gradients' flats too; seven of attention,
    which a causal mask halves.
    """
    model, batch = source_of("tests.plan.models:llama", 1, 8)()
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    gpu = replace(HARDWARE.gpu, half=1e12, single=1e12, bandwidth=1e30)
    exact = Efficiency(matmul=1.0, attention=1.0, memory=1.0, kernel=0.0)
    config = Config.load({"stage": 3, "compile": {"enabled": compiled}})
    costs = PlannedRank(model, batch, torch.optim.AdamW, config, 2, Hardware(gpu, exact)).measure().costs
    attention = 2 * 7 * (2 * 8 * 8 * 12)
    assert sum(costs.compute) * 1e12 == pytest.approx(6 * matrices * 8 + attention)


def test_attention_that_is_recomputed_takes_its_time_again_and_memory_that_has_a_number() -> None:
    """Its random state is the reason: see `run_random_plainly`. Each block has 2 + 2 + 5 products of attention, and 4
    of its matrix.
    """
    gpu = replace(HARDWARE.gpu, half=1e12, single=1e12, bandwidth=1e30)
    exact = Efficiency(matmul=1.0, attention=1.0, memory=1.0, kernel=0.0)
    model, batch = source_of("tests.plan.models:recomputed", 1, 8)()
    config = Config.load({"stage": 3, "compile": {"enabled": True}})
    found = PlannedRank(model, batch, torch.optim.AdamW, config, 2, Hardware(gpu, exact)).measure()
    tokens, blocks = 2 * 8, 2
    matrices = 2 * tokens * 16 * (2 * 16 + blocks * 4 * 48)  # the first layer has no gradient of its input
    assert sum(found.costs.compute) * 1e12 == pytest.approx(matrices + blocks * 2 * 9 * (2 * 8 * 8 * 16))
    assert type(found.plan().peak) is int and type(found.activations) is int


def test_code_that_asks_for_values_is_refused_by_the_name_of_its_module() -> None:
    with pytest.raises(EngineError, match=r"^\[ZW\d+\] '1' needs values of tensors"):
        rank("peeking").measure()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"precision": {"params": "float16"}}, "loss_scale"),
        ({"experts": {"parallel_size": 2, "parameters": ["x"]}}, "experts"),
        ({"offload": {"optimizer": "adaptive", "memory_budget": 1}}, "'adaptive'.* measured on the GPU"),
    ],
)
def test_what_a_plan_would_leave_out_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        rank("llama", **settings)


AWAY = {"optimizer": {"optimizer": "all"}, "params": {"params": True}, "activations": {"activations": True}}


@pytest.mark.matrix
def test_what_is_offloaded_is_not_on_the_device_and_takes_time_on_the_way() -> None:
    """Times of copies that no figure hides: over a link a thousandth as fast."""
    slow = Hardware(replace(HARDWARE.gpu, host=1e6), HARDWARE.efficiency)

    def row(hardware: Hardware, *kinds: str) -> Row:
        source = source_of("tests.plan.models:llama", 4, 64)
        offload = {key: value for kind in kinds for key, value in AWAY[kind].items()}
        if "activations" in kinds:
            offload["activations_threshold_bytes"] = 256
        settings = {"precision": {"params": "bfloat16"}, "offload": offload, "compile": {"enabled": False}}
        return make(source, (3,), (2,), settings, hardware).rows[0]

    plain = row(HARDWARE)
    assert plain.host == 0
    for kinds in (("optimizer",), ("params",), ("optimizer", "params"), ("activations",)):
        fast, hindered = row(HARDWARE, *kinds), row(slow, *kinds)
        assert 0 < fast.host == hindered.host, kinds
        assert fast.peak < plain.peak, kinds
        assert fast.activations == plain.activations or "activations" in kinds, kinds
        state = sum((each.parameters + each.optimizer) * sign for each, sign in ((plain, 1), (fast, -1)))
        assert (state > 0) == (kinds != ("activations",)), kinds
        assert hindered.seconds > fast.seconds + fast.host / 1e6, kinds


@pytest.mark.matrix
def test_compact_states_take_less_memory_and_more_time() -> None:
    def row(optimizer: str, offload: str = "none") -> Row:
        precision = {"params": "bfloat16", "optimizer": optimizer}
        settings = {"precision": precision, "offload": {"optimizer": offload}, "compile": {"enabled": False}}
        return make(source_of("tests.plan.models:llama", 1, 8), (3,), (2,), settings, HARDWARE).rows[0]

    full, compact = row("full"), row("compact")
    assert compact.parameters == full.parameters * 3 / 4
    numel = full.parameters / 4
    assert 0 <= compact.optimizer - numel * (2 + 8 / 64) <= 4 * 100, "codes, scales and step counters"
    assert compact.peak < full.peak and compact.seconds > full.seconds
    away, exact = row("compact", "all"), row("full", "all")
    assert (compact.host, away.host) == (0, numel * (3 + 8 / 64)), "codes, scales and remainders"
    assert 9 * numel < exact.host <= 10 * numel, "moments and remainders: the device has the bfloat16 of split masters"
    assert away.peak < compact.peak and compact.seconds < away.seconds


@pytest.mark.matrix
def test_collectives_that_nobody_waits_for_take_time_from_what_is_computed_beside_them() -> None:
    found = {}
    for beside in (0.0, 0.5):
        model, batch = source_of("tests.plan.models:llama", 64, 64)()
        hardware = Hardware(HARDWARE.gpu, replace(HARDWARE.efficiency, contention=beside))
        config = Config.load({"stage": 3, "compile": {"enabled": False}})
        found[beside] = PlannedRank(model, batch, torch.optim.AdamW, config, 2, hardware).measure().plan()
    sent = found[0.5].prediction.busy("all_gather", "reduce_scatter")
    assert found[0.0].seconds == found[0.0].prediction.seconds == found[0.5].prediction.seconds
    hidden = sent - sum(found[0.5].prediction.waits.values())
    assert hidden > 0
    # a gather's cast of the shard belongs to its time, and is not taken from anybody
    assert found[0.5].seconds - found[0.0].seconds == pytest.approx(0.5 * hidden, rel=0.1)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("nowhere", "no file, no folder"),
        ("tests.plan.nowhere:f", "cannot be imported"),
        ("tests.plan.models:Text", "cannot be imported"),
        ("tests", "has no config.json"),
    ],
)
def test_what_is_no_model_is_refused(model: str, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        source_of(model, 1, 8)


@pytest.mark.matrix
def test_a_folder_of_transformers_has_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 50, **sizes}))
    model, batch = source_of(str(tmp_path), 3, 8)()
    assert all(parameter.is_meta for parameter in model.parameters()) and len(model.model.layers) == 2
    assert batch["input_ids"].shape == (3, 8) and batch["labels"].is_meta
    assert not model.config.use_cache  # else each engine of a plan warns of it
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(EngineError, match="no causal language model"):
        source_of(str(tmp_path), 3, 8)()


def test_a_function_returns_a_module_and_a_batch() -> None:
    with pytest.raises(EngineError, match="must return"):
        source_of("tests.plan.models:only_a_module", 1, 8)()


def test_the_fastest_that_fits_is_advised_and_of_equals_the_smallest() -> None:
    small = replace(ROW, stage=2, seconds=1.005, peak=50)
    large = replace(ROW, stage=1, seconds=0.5, peak=1 << 40, fits=False)
    advice = advise([ROW, small, large], 2, 1 << 30)
    assert advice.take == small
    assert "stage 1, auto would be faster and takes more than 1.0 GiB" in advice.reason
    assert "host memory" not in advice.reason
    assert "takes 2.0 GiB of host memory" in advise([replace(ROW, host=2 << 30)], 2, 1 << 30).reason
    nothing = advise([large], 2, 1 << 30)
    assert nothing.take is None and "stage 1, auto takes least, 1024.0 GiB" in nothing.reason


def test_a_table_shows_every_row() -> None:
    rows = (ROW, replace(ROW, stage=1, peak=1 << 30, fits=False))
    plans = Plans(rows, (advise(rows, 2, 500),), {"head": "it <breaks>"}, room=500)
    text = "\n".join(lines(plans))
    assert "stage 3, auto" in text and "1.00 !" in text and "head runs eagerly: it <breaks>" in text
    assert "host" not in text and "each rank in GiB" in text
    away = "\n".join(lines(replace(plans, rows=(replace(ROW, host=3 << 20),))))
    assert "host" in away and "3.00" in away and "each rank in MiB" in away


@pytest.mark.matrix
def test_the_command_plans_a_world_of_1024_ranks(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "plan.json")]
    asked = ["plan", "tests.plan.models:llama", "--seq", "8", "--world", "2", "--world", "1024", *files]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    state = {(row["stage"], row["world"]): row["parameters"] + row["optimizer"] for row in rows}
    assert state[3, 1024] < state[3, 2]
    assert "1024 ranks: take" in result.output
    shown = [line.partition(" ranks: ") for line in result.output.splitlines() if line.startswith("config of ")]
    assert [head.rsplit(" ", 1)[1] for head, _, _ in shown] == ["2", "1024"]
    assert all(Config.load(json.loads(text)).precision.params == "bfloat16" for _, _, text in shown)


@pytest.mark.matrix
def test_sharding_groups_send_less_between_nodes_and_take_memory(tmp_path: Path) -> None:
    asked = ["plan", "tests.plan.models:llama", "--seq", "8", "--world", "16", "--stage", "3", "--gas", "4"]
    asked += ["--between", "0.01", "--group-size", "8", "--group-size", "16", "--json", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 0, result.output
    rows = {(r["group_size"], r["schedule"]): r for r in json.loads((tmp_path / "plan.json").read_text())["rows"]}
    groups, one = rows[8, "prefetch 1"], rows[None, "prefetch 1"]
    assert groups["seconds"] < 0.5 * one["seconds"]
    assert groups["parameters"] > one["parameters"] and groups["optimizer"] == one["optimizer"]
    assert '"sharding": {"group_size": 8}' in result.output
    result = CliRunner().invoke(cli.app, [*asked, "--states", "group"])
    assert result.exit_code == 0, result.output
    rows = {(r["group_size"], r["schedule"]): r for r in json.loads((tmp_path / "plan.json").read_text())["rows"]}
    copied = rows[8, "prefetch 1"]
    assert copied["optimizer"] == pytest.approx(2 * groups["optimizer"], rel=0.01)
    assert copied["parameters"] < groups["parameters"], "no second part to gather from"
    assert copied["seconds"] == pytest.approx(groups["seconds"], rel=0.05) and "group_size" in result.output


def test_rings_across_groups_share_the_adapters_of_a_node() -> None:
    """24 ranks of 3 nodes: 8 rings of one rank a node have what one ring of all has."""
    line, between = HARDWARE.collective(24), HARDWARE.gpu.between * HARDWARE.efficiency.between
    assert line.beta == pytest.approx(23 / 24 / min(8 * between, HARDWARE.gpu.inside * HARDWARE.efficiency.inside))
    assert HARDWARE.collective(3, stride=8).beta == pytest.approx(2 / 3 / between)
    assert HARDWARE.collective(6, stride=4).beta == pytest.approx(5 / 6 / (2 * between))


def test_a_row_has_a_config_to_paste() -> None:
    settings = {"precision": {"params": "bfloat16"}, "compile": {"activation_budget": 0.0}, "gradient_clipping": None}
    told = {name: config_of(replace(ROW, schedule=name), settings, 72) for name in ("prefetch 1", "auto", "keep auto")}
    base = {"stage": 3, "precision": {"params": "bfloat16"}}
    assert told["prefetch 1"] == {**base, "compile": {"activation_budget": 0.0, "prefetch": 1, "keep": "none"}}
    assert told["auto"] == {**base, "compile": {"activation_budget": 0.0}}
    assert told["keep auto"] == {**base, "compile": {"activation_budget": 0.0, "memory_budget": 72}}
    assert config_of(replace(ROW, stage=2), {}, 72) == {"stage": 2}
    assert json.loads(json.dumps(told)) == told and all(Config.load(config).stage == 3 for config in told.values())


@pytest.mark.matrix
def test_the_command_plans_as_it_is_asked(tmp_path: Path) -> None:
    calibration = tmp_path / "h100.json"
    Calibration("NVIDIA H100 80GB HBM3", 8, 1, {"matmul": 6e14, "host": 5e10}, {"contention": 0.25}).save(calibration)
    asked = ["--seq", "8", "--world", "2", "--offload", "optimizer,params", "--gas", "2", "--clip"]
    asked += ["--activation-budget", "0.5"]
    files = ["--calibration", str(calibration), "--json", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(cli.app, ["plan", "tests.plan.models:llama", *asked, *files])
    assert result.exit_code == 0, result.output
    assert "zeroweave: planning stage 3 on 2 ranks\n" in result.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {row["stage"] for row in plan["rows"]} == {3} and all(row["host"] for row in plan["rows"])
    assert plan["config"]["gradient_accumulation_steps"] == 2 and plan["config"]["gradient_clipping"]
    assert plan["config"]["compile"] == {"activation_budget": 0.5}
    assert plan["hardware"]["gpu"]["memory"] == GPUS["h100"].memory
    share = plan["hardware"]["efficiency"]
    assert share["contention"] == 0.25 and share["matmul"] == pytest.approx(6e14 / GPUS["h100"].half)
    assert share["memory"] == Efficiency().memory


def test_the_command_foresees_a_loss_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "BYTES", 4 * 2000 * 64)  # 64 of 512 tokens
    peaks = []
    for more in ([], ["--loss", "chunked"]):
        asked = ["plan", "tests.plan.models:language", "--seq", "512", "--stage", "3", "--json", str(tmp_path / "plan")]
        result = CliRunner().invoke(cli.app, [*asked, *more])
        assert result.exit_code == 0, result.output
        assert ('"loss": "chunked"' in result.output) == bool(more)
        peaks.append(json.loads((tmp_path / "plan").read_text())["rows"][0]["peak"])
    # Whole logits: bfloat16, float32 and two more of the same, all of them in the backward.
    assert peaks[0] - peaks[1] > 512 * 2000 * 8


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--world", "2000"], "1 to 1,024"),
        (["--loss", "chunked"], "Llama.get_output_embeddings() names no layer"),
        (["--offload", "all"], "write optimizer, params"),
        (["--offload", "adaptive"], "measured on the GPU"),
        (["--offload", "params", "--stage", "2"], "offload.params"),
        (["--offload", "params", "--compact"], "'compact' keeps what is gathered on the device, and offload.params"),
        (["--precision", "float32", "--compact"], "is for bfloat16 parameters"),
        (["--calibrate", "a.json", "--calibration", __file__], "--calibrate"),
        (["--calibration", __file__], "is no calibration"),
    ],
)
def test_the_command_says_what_is_wrong(asked: list[str], told: str) -> None:
    result = CliRunner().invoke(cli.app, ["plan", "tests.plan.models:llama", *asked])
    assert result.exit_code == 2 and told in result.output


def test_the_command_needs_a_model_or_something_to_calibrate() -> None:
    result = CliRunner().invoke(cli.app, ["plan"])
    assert result.exit_code == 2 and "MODEL" in result.output


@pytest.mark.matrix
def test_the_command_measures_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    result = CliRunner().invoke(cli.app, ["plan", "--calibrate", str(path)])
    assert result.exit_code == 0, result.output
    assert "measured on 2 x cpu, 1 host" in result.output
    assert Calibration.load(path).rates["matmul"] > 0
