"""All errors share a base, and each begins with a code that `zeroweave explain` knows."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import zeroweave as zw
from tests.support.commands import ROOT
from zeroweave import cli, errors
from zeroweave.ranks.control import Diverged

PACKAGE = ROOT / "zeroweave"
HEAD, _, *ROWS = (
    line.removeprefix("| ").removesuffix(" |").split(" | ")
    for line in (PACKAGE / "error_codes.md").read_text().splitlines()
)
CODES = [row[0] for row in ROWS]
CLASSES = {value.__name__: value for value in (*vars(errors).values(), Diverged) if inspect.isclass(value)}

UNCODED = {
    # pydantic makes a ConfigError of them
    ("config/config.py", "ValueError"),
    ("config/sections.py", "ValueError"),
    # another error is made of them where they are caught
    ("checkpoint/files.py", "OSError"),
    ("checkpoint/compatibility.py", "LookupError"),
    ("checkpoint/folder.py", "ValueError"),
    ("checkpoint/manifest.py", "ValueError"),
    ("checkpoint/plain.py", "ValueError"),
    ("checkpoint/reader.py", "OSError"),
    ("checkpoint/staging.py", "FileExistsError"),
    ("checkpoint/writer.py", "_Stopped"),
    ("ranks/channel.py", "ConnectionError"),
    ("ranks/channel.py", "Forged"),
    ("ranks/control.py", "ConnectionError"),
    ("report/launch.py", "RuntimeError"),
    ("_triton/masters.py", "RuntimeError"),
    # what no program can bring about
    ("checkpoint/folder.py", "AssertionError"),
    ("comm/pending.py", "RuntimeError"),
    ("comm/registered_buffers.py", "RuntimeError"),
    ("comm/process_group.py", "RuntimeError"),
    ("demo/text.py", "ValueError"),
    ("layout.py", "IndexError"),
    ("plan/device.py", "NotImplementedError"),
    ("ranks/control.py", "ValueError"),
    ("runtime/replay.py", "AssertionError"),
    ("_torch/modes.py", "NotImplementedError"),
    ("optim/multi_optimizer.py", "KeyError"),
}
"""What is raised without a code, by file."""
OTHERWISE = {"SystemExit", "typer.Exit", "typer.BadParameter", "type(error)", "type(theirs)", "kind"}
"""Ends of the process, usage of the command line, and coded errors that are raised again."""


def raised() -> Iterator[tuple[str, ast.Raise, str]]:
    """Each `raise` of the package: its file, itself, and the class as it is written."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                yield path.relative_to(PACKAGE).as_posix(), node, ast.unparse(made)


def test_every_error_has_a_code() -> None:
    without = set()
    for file, node, name in raised():
        if isinstance(node.exc, ast.Name | ast.Attribute) and name[0].islower():
            continue  # an exception that was made before
        text = ast.unparse(node.exc) if node.exc is not None else ""
        if name not in CLASSES and name not in OTHERWISE and not re.search(r"\[ZW\d{3}\] ", text):
            without.add((file, name))
    assert without == UNCODED


def test_every_code_is_in_the_table_and_every_entry_is_used() -> None:
    used = {error.code for error in CLASSES.values()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and path.name not in ("errors.py", "cli.py")
            ):
                found = re.findall(r"\[?ZW\d+\]? ?", node.value)
                used |= {each.strip("[] ") for each in found}
                assert all(node.value.startswith(each) and re.fullmatch(r"\[ZW\d{3}\] ", each) for each in found), (
                    node.value
                )
    assert sorted(used) == CODES == sorted(set(CODES))


def test_every_entry_has_a_cause_an_example_and_a_mend() -> None:
    for code, cause, example, mend in ROWS:
        assert re.fullmatch(r"ZW\d{3}", code)
        assert re.fullmatch(r"\*\*[A-Za-z][^*]+\.\*\*( .*\.)?", cause), code
        assert example and re.fullmatch(r".*\.", mend), code


def test_the_pages_name_codes_of_the_table() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert set(re.findall(r"ZW\d{3}", page.read_text())) <= set(CODES), page


@pytest.mark.parametrize("row", ROWS, ids=CODES)
def test_explain_prints_the_entry(row: list[str]) -> None:
    done = CliRunner().invoke(cli.app, ["explain", row[0]])
    lines = [f"{name}: {cell}\n" for name, cell in zip(HEAD, row, strict=True)]
    assert (done.exit_code, done.stdout) == (0, "".join(lines).replace("**", ""))


def test_explain_takes_a_code_as_messages_have_it_and_refuses_others() -> None:
    assert CliRunner().invoke(cli.app, ["explain", "[zw203]"]).stdout.startswith("code: ZW203\n")
    done = CliRunner().invoke(cli.app, ["explain", "ZW999"])
    assert done.exit_code == 2 and "there is no 'ZW999'" in done.output and "ZW101" in done.output


def test_every_error_is_a_zeroweave_error_with_a_docstring() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(classes) == 14
    for error in classes:
        assert issubclass(error, errors.ZeroweaveError)
        assert error.__doc__ and error.__doc__ != RuntimeError.__doc__
        assert str(error("what happened")) == f"[{error.code}] what happened"


def test_a_code_is_said_once_and_in_front() -> None:
    inner = errors.EngineError("[ZW403] step() on a destroyed engine")
    outer = errors.AgreementError(f"rank 1 gave up at 'step': {inner}; {inner}")
    assert str(outer).count("[ZW403] ") == 1 and "[ZW501]" not in str(outer)
    assert str(outer).startswith("[ZW403] rank 1 gave up at 'step': step() on a destroyed engine; step()")
    assert (inner.code, outer.code, errors.AgreementError.code) == ("ZW403", "ZW403", "ZW501")
    for error in (inner, outer, errors.ConfigError("wrong")):
        for same in (copy.copy(error), pickle.loads(pickle.dumps(error)), type(error)(str(error))):
            assert (type(same), str(same), same.code) == (type(error), str(error), error.code)


def test_errors_can_be_caught_as_what_they_are() -> None:
    assert issubclass(errors.ZeroweaveError, RuntimeError)
    assert issubclass(errors.ConfigError, ValueError)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def started(config: object) -> None:
    module = model()
    zw.initialize(module, torch.optim.AdamW(module.parameters()), config).destroy()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "config"),
    [
        ("ZW101", {"stage": 4}),
        ("ZW101", {"stage": 0}),
        ("ZW101", {"bucket": {"bytes": "big"}}),
        ("ZW102", {"gradient_acumulation_steps": 4}),
        ("ZW103", {"stage": 2, "offload": {"params": True}}),
        ("ZW103", {"experts": {"parallel_size": 3, "parameters": ["*"]}}),
        ("ZW104", "config.yaml"),
        ("ZW105", {"zero_optimization": {"stage": 2}}),
        ("ZW106", {"compile": {"regions": ["layer.*"]}}),
    ],
)
def test_examples_of_configs(code: str, config: object) -> None:
    with pytest.raises(errors.ConfigError, match=rf"^\[{code}\] ") as caught:
        started(config)
    assert caught.value.code == code


def test_a_file_has_the_code_of_what_is_wrong_in_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"stage": 2, "sage": 3, "reduce": {"depth": 0}}')
    with pytest.raises(errors.ConfigError) as caught:
        zw.Config.load(path)
    assert (
        str(caught.value).startswith(f"[ZW102] {path}: 2 errors in the config:\n")
        and str(caught.value).count("ZW") == 1
    )


def test_examples_of_engine_calls(tmp_path: Path) -> None:
    module, said = model(), {}
    optimizer = torch.optim.AdamW(module.parameters())
    engine = zw.initialize(module, optimizer, {"stage": 3, "compile": {"enabled": False}})
    loss = engine(torch.ones(2, 4, device=engine.device)).sum()
    engine.backward(loss)
    wrong = {
        "ZW401": lambda: engine.save(tmp_path, tag=3),  # type: ignore[arg-type]
        "ZW402": lambda: engine.load(tmp_path),
        "ZW406": lambda: engine.full("layer.weight"),
        "ZW203": lambda: module[0].weight.norm(),  # type: ignore[union-attr, operator]
        "ZW303": lambda: optimizer.state[module[0].weight]["exp_avg"],  # type: ignore[index]
    }
    for code, call in wrong.items():
        with pytest.raises(errors.ZeroweaveError) as caught:
            call()
        said[code] = caught.value.code
    engine.step()
    with pytest.raises(errors.EngineError, match=r"^\[ZW402\] step\(\) without a backward"):
        engine.step()
    engine.zero_grad()
    with pytest.raises(errors.CheckpointError, match=r"^\[ZW601\] "):
        engine.load(tmp_path, tag="step-10")
    engine.destroy()
    with pytest.raises(errors.EngineError, match=r"^\[ZW403\] "):
        engine.step()
    assert said == {code: code for code in wrong}
