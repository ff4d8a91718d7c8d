"""`zeroweave ckpt`: checkpoints looked at, verified, compared, exported and removed, and what each ends with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.text import Text
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import zeroweave as zw
from tests.checkpoint.small import Runs
from tests.support.commands import zeroweave
from tests.support.harness import Pools
from zeroweave import cli
from zeroweave.checkpoint.manifest import Entry, Manifest
from zeroweave.checkpoint.torch_save import convert
from zeroweave.report.checkpoints import inspect

TAGS = [f"step-{step:08d}" for step in (1, 2, 3)]


class Config:
    """Of a model, as transformers has it."""

    def to_json_string(self) -> str:
        return '{"width": 9}'

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(self.to_json_string())


class Net(nn.Module):
    """In bfloat16, with tied parameters, one of another dtype, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Linear(9, 9)
        self.bfloat16()
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x.bfloat16()))) * self.scale


def make(stage: int = 3) -> zw.Engine:
    torch.manual_seed(0)
    model = Net()
    config = {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": 120}
    return zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one rank in `run`, and what the engine exports of the last in `exported`."""
    folder = tmp_path_factory.mktemp("original")
    with make() as engine:
        for step in range(3):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
            engine.train_step(x, lambda y, _: y.float().square().mean())
            engine.save(folder / "run", client_state={"note": 1}, data=zw.data.GlobalBatchSampler(8, 2))
        engine.export(folder / "exported")
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints, to be spoilt."""
    return Path(shutil.copytree(original / "run", tmp_path / "run"))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["ckpt", *map(str, arguments)])


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------------- inspect
def test_inspect_shows_the_latest_of_a_folder_or_the_one_that_is_named(original: Path) -> None:
    done = invoke("inspect", original / "run")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("step-00000003: step 3, stage 3, ranks: 1\n")
    assert "optimizer: AdamW, groups of parameters: 1" in done.output
    assert "data: one position for all ranks" in done.output and "client_state: note" in done.output
    assert "step-00000001, step-00000002" in done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert ["param/first.weight", "F32", "9", "×", "9", "324", "B", "1"] in rows
    assert ["buffer/norm.num_batches_tracked", "I64", "scalar", "8", "B", "1"] in rows
    assert invoke("inspect", original / "run" / TAGS[0]).output.startswith("step-00000001: step 1")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_inspect_fits_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are folded, and nothing of them is lost. Long tags, kinds and client states are broken, too."""
    name = f"state/{'model.layers.127.mlp.experts.' * 4}weight/exp_avg_sq"
    entries = {name: Entry(shape=(151936, 16384, 1024), dtype="F8_E4M3", pieces=())}
    values = {"optimizer": {"kind": "Kind" * 30, "groups": []}, "client": {f"key {n}": n for n in range(30)}}
    for tag in (f"{'tag-' * 30}{n}" for n in range(3)):
        made = Manifest(tag=tag, step=1 << 60, world=1, stage=3, files={}, tensors={}, values=values)
        made = made.model_copy(update={"tensors": entries})
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "manifest.json").write_bytes(made.sealed())
    monkeypatch.setattr("zeroweave.checkpoint.manifest._check", lambda manifest: None)  # the tensor has no bytes
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    inspect(tmp_path / tag)
    lines = Text.from_ansi(terminal.getvalue()).plain.splitlines()
    assert max(map(cell_len, lines)) == 80, lines
    table = lines[next(n for n, line in enumerate(lines) if line.startswith(" tensor ")) + 2 :]
    assert "".join(line.split()[0] for line in table if line.strip()) == name
    assert "151936 × 16384 × 1024" in table[0]


# ---------------------------------------------------------------------- verify
def test_verify_reads_all_checkpoints_of_a_folder_or_one(original: Path) -> None:
    done = invoke("verify", original / "run")
    assert done.exit_code == 0 and done.output.split() == [
        word for name in (*TAGS, "latest") for word in ("whole", name)
    ]
    assert invoke("verify", original / "run" / TAGS[1]).output.split() == ["whole", TAGS[1]]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("rank-00000.safetensors", "rank-00000.safetensors is damaged: its hash is not that"),
        ("manifest.json", "manifest.json is damaged: its checksum"),
    ],
)
def test_verify_names_what_is_broken(run: Path, file: str, words: str) -> None:
    spoil(run / TAGS[1] / file)
    done = invoke("verify", run)
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines] == ["whole", "broken", "whole", "whole"]
    assert words in lines[1]


def test_verify_sees_what_has_no_manifest_and_a_damaged_latest(run: Path) -> None:
    (run / TAGS[0] / "manifest.json").unlink()
    (run / "latest").write_text("{}")
    lines = invoke("verify", run).output.splitlines()
    assert [line.split()[0] for line in lines] == ["broken", "whole", "whole", "broken"]
    assert "latest is damaged" in lines[3]
    assert invoke("verify", run / TAGS[0]).exit_code == 1


# ---------------------------------------------------------------------- diff
def test_diff_of_two_steps(original: Path) -> None:
    done = invoke("diff", original / "run" / TAGS[1], original / "run")
    assert done.exit_code == 1
    assert "step: 2 and 3" in done.output and "value scalar/first.weight/step: differs" in done.output
    assert "\nparam/first.weight: 81 of 81 elements differ, by at most 0.0" in done.output
    assert "buffer/norm.num_batches_tracked: 1 of 1 elements differ\n" in done.output
    assert "exp_avg_sq" in done.output and "value client" not in done.output


def resaved(folder: str, out: str, stage: int, change: bool) -> None:
    with make(stage) as engine:
        engine.load(folder)
        if change:
            weight = engine.full("last.bias")
            assert weight is not None
            weight[5] += 0.25
            engine.set_full("last.bias", weight)
        engine.save(out, client_state={"note": 1})


def test_diff_sees_one_element_between_worlds_and_nothing_else(pools: Pools, original: Path, tmp_path: Path) -> None:
    for name, change in (("same", False), ("other", True)):
        pools(2).run(resaved, str(original / "run"), str(tmp_path / name), 2, change)
    done = invoke("diff", original / "run", tmp_path / "same")
    assert done.output.splitlines() == ["value data: only in the first"]
    done = invoke("diff", tmp_path / "same", tmp_path / "other")
    assert (done.exit_code, done.output) == (1, "param/last.bias: 1 of 9 elements differ, by at most 0.25\n")
    done = invoke("diff", tmp_path / "same", tmp_path / "same")
    assert (done.exit_code, done.output) == (0, "equal\n")


# ---------------------------------------------------------------------- export
def exported(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_export_gives_what_the_engine_exports(original: Path, tmp_path: Path) -> None:
    """Dtypes, tied names and the config included, though the order of the tensors is the checkpoint's."""
    assert invoke("export", original / "run", tmp_path / "out").exit_code == 0
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", original / "exported"))
    assert mine.keys() == theirs.keys() and {"first.weight", "last.weight", "scale"} <= mine.keys()
    assert all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)
    assert exported(tmp_path / "out").keys() == exported(original / "exported").keys()
    assert (tmp_path / "out" / "config.json").read_text() == '{"width": 9}'


class Counting(nn.Linear):
    """Has extra state."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_export_tells_that_it_leaves_out_extra_state(original: Path, tmp_path: Path) -> None:
    config = {"compile": {"enabled": False}}
    with zw.initialize(nn.Sequential(Counting(4, 4), Counting(4, 4)), torch.optim.AdamW, config) as engine:
        engine.save(tmp_path / "run")
    done = invoke("export", tmp_path / "run", tmp_path / "out")
    assert done.exit_code == 0
    assert done.stderr == "zeroweave: the export leaves out extra state of modules: 2 entries\n"
    assert invoke("export", original / "run", tmp_path / "other").stderr == ""


def test_export_in_another_dtype_and_in_several_files(original: Path, tmp_path: Path) -> None:
    done = invoke("export", original / "run" / TAGS[2], tmp_path / "out", "--dtype", "float32", "--shard-bytes", 400)
    assert done.exit_code == 0, done.output
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    loaded = {k: v for name in set(index["weight_map"].values()) for k, v in load_file(tmp_path / "out" / name).items()}
    assert loaded.keys() == index["weight_map"].keys()
    assert {value.dtype for value in loaded.values()} == {torch.float32, torch.int64}


@pytest.mark.matrix
def test_transformers_reads_an_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.hf_models import llama

    torch.manual_seed(0)
    ids = torch.arange(12).view(1, 12)
    with zw.initialize(llama(), torch.optim.AdamW, {"compile": {"enabled": False}}) as engine:
        engine.train_step({"input_ids": ids, "labels": ids})
        engine.save(tmp_path / "run")
        expected = engine.eval()(input_ids=ids).logits.detach().clone()
    assert invoke("export", tmp_path / "run", tmp_path / "out").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.eval()(input_ids=ids, use_cache=False).logits, expected)


# ---------------------------------------------------------------------- import
def test_import_of_plain_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = Net(), tmp_path / "plain.pt"
    torch.save({"epoch": 3, "model": model.state_dict(), "optimizer": {"state": {}}}, file)
    assert invoke("import", "--trust-pickle", file, tmp_path / "out").exit_code == 0
    loaded, expected = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


def imported(file: Path, key: str = "") -> str:
    return convert(file, file.parent / "out", key, 1 << 30)


def test_import_runs_no_code_and_wants_to_be_asked(tmp_path: Path) -> None:
    file, ran = tmp_path / "plain.pt", tmp_path / "ran"
    torch.save({"weights": nn.Linear(2, 2).state_dict(), "parameter": nn.Linear(2, 2), "more": Runs(ran)}, file)
    done = invoke("import", file, tmp_path / "out")
    assert done.exit_code == 2 and "--trust-pickle" in done.stderr
    assert imported(file, "weights").startswith("wrote 2 tensors") and not ran.exists()
    torch.load(file, weights_only=False)
    assert ran.exists(), "what was not to run could have"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "a list and no dictionary"),
        ({"a": 1, "model": {}, "module": {}}, "by --key; the file has a, model, module"),
        ({"model": 3}, "there is no state dict"),
        ({"a": torch.zeros(2), "b": torch.zeros(2).to_sparse()}, "1 entries are no tensors .* 'b': torch.sparse_coo"),
    ],
)
def test_import_of_what_is_no_state_dict(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(zw.CheckpointError, match=words):
        imported(tmp_path / "file.pt")
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_import_of_what_is_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(b"no pickle")
    done = zeroweave("ckpt", "import", "--trust-pickle", tmp_path / "file.pt", tmp_path / "out")
    assert done.returncode == 2 and "is no file of torch.save" in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )


# ---------------------------------------------------------------------- prune
def test_prune_keeps_the_last_ones_and_each_so_many_th(run: Path) -> None:
    assert invoke("prune", run, "--keep-last", 1, "--keep-every", 2).output == f"removed {TAGS[0]}\n"
    assert sorted(path.name for path in run.iterdir()) == ["latest", *TAGS[1:]]
    assert invoke("verify", run).exit_code == 0


# ---------------------------------------------------------------------- what cannot be done
def _impossible(run: Path) -> Iterator[tuple[list[object], str]]:
    empty = run.parent / "empty"
    empty.mkdir()
    yield ["inspect", empty], "latest cannot be read"
    yield ["verify", empty], "there is no checkpoint in"
    yield ["prune", empty, "--keep-last", 1], "latest cannot be read"
    yield ["export", run, empty], "is there already"
    spoil(run / TAGS[2] / "rank-00000.safetensors")
    yield ["diff", run / TAGS[0], run], "rank-00000.safetensors is damaged"
    yield ["export", run, run.parent / "out"], "rank-00000.safetensors is damaged"
    assert not (run.parent / "out").exists()
    yield ["export", run / TAGS[0], "/proc/nowhere/out"], "No such file"


def test_what_cannot_be_done_ends_with_two_and_a_line(run: Path) -> None:
    for arguments, words in _impossible(run):
        done = invoke(*arguments)
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (arguments, done.output)
        assert done.stderr.startswith("zeroweave: ") and words in done.stderr and done.stderr.count("\n") == 1
