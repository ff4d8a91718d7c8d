"""A finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "limited", "failed"]
"""`slow`: training works, and could be faster; `limited`: training works in another way; `failed`: it does not work."""


@dataclass(frozen=True)
class Check:
    """One finding in one line. `cure`: the command or the setting that mends it, where the state is not ok."""

    name: str
    state: State
    detail: str
    cure: str = ""

    def lines(self) -> Iterator[str]:
        """The lines that the doctor prints."""
        yield f"{self.state:8} {self.name}: {self.detail}"
        if self.state != "ok":
            yield f"{'':8} -> {self.cure}"
