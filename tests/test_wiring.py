"""The check that attributes are written by the objects that own them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.wiring import Package

OWNER = """
class Owner:
    declared: int = 0

    def __init__(self):
        self.fact = self.data = 1

    def change(self):
        self.fact = 2

        def inside():
            self.fact = 3
"""


def breaches(root: Path, code: str) -> list[str]:
    (root / "owner.py").write_text(OWNER)
    (root / "user.py").write_text(code)
    return [each.removeprefix(f"{root}/") for each in Package(root).breaches([root])]


@pytest.mark.parametrize(
    "write",
    [
        "owner.fact = 2",
        "owner.fact += 1",
        "owner.fact: int = 2",
        "owner.declared = 2",
        "owner.other, owner.fact = 1, 2",
        "del owner.fact",
        "setattr(owner, 'fact', 2)",
        "object.__setattr__(owner, 'fact', 2)",
        "owner.__dict__['fact'] = 2",
        "del vars(owner)['fact']",
        "for owner.fact in range(3): pass",
        "self.owner.fact = 2",
        "owner = Owner() if owner is None else owner; owner.fact = 2",
    ],
)
@pytest.mark.parametrize("function", ["use", "__init__"])
def test_a_write_from_outside_is_found(tmp_path, function, write):
    (found,) = breaches(tmp_path, f"def {function}(self, owner):\n    {write}\n")
    assert found.startswith("user.py:2: ")
    assert found.endswith((".fact", ".declared"))


@pytest.mark.parametrize(
    "write",
    [
        "self.fact = 2",
        "owner.theirs = 2",
        "owner['fact'] = 2",
        "tensor.data = owner.data",
        "print(owner.fact)",
        "made = Owner(); made.fact = 2",
        "made: Owner = module.make(Owner, 1); made.fact = 2",
        "made = cls.__new__(cls); made.fact = 2",
    ],
)
def test_what_is_ones_own_or_other_peoples_may_be_written(tmp_path, write):
    assert breaches(tmp_path, f"def use(self, owner):\n    {write}\n") == []


@pytest.mark.parametrize(
    "write", ["setattr(owner, name, 2)", "object.__setattr__(owner, name, 2)", "vars(owner)[name] = 2"]
)
def test_an_attribute_whose_name_is_computed_may_be_any(tmp_path, write):
    assert breaches(tmp_path, f"def use(owner, name):\n    {write}\n") == ["user.py:2: owner.?"]
    assert breaches(tmp_path, f"def use(self, name):\n    {write.replace('owner', 'self')}\n") == []


def test_what_another_function_has_made_is_another_object(tmp_path):
    code = "made = Owner()\n\ndef use():\n    made.fact = 2\n\n    def inside():\n        made.fact = 3\n"
    assert breaches(tmp_path, code) == ["user.py:4: made.fact", "user.py:7: made.fact"]


def test_only_the_places_that_are_named_are_checked(tmp_path):
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "reader.py").write_text("def read(owner): return owner.fact\n")
    assert breaches(tmp_path, "def use(owner):\n    owner.fact = 2\n")
    assert list(Package(tmp_path).breaches([tmp_path / "clean"])) == []
