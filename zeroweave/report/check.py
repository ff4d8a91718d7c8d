"""What a check of the doctor finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "limited", "failed"]
"""`slow`: training works, and would be faster otherwise; `limited`: works in some other way; `failed`: does not."""


@dataclass(frozen=True)
class Check:
    """One finding in one line; `cure`, in one line, is the command or the setting that mends a state other than ok."""

    name: str
    state: State
    detail: str
    cure: str = ""

    def lines(self) -> Iterator[str]:
        """As the doctor prints it."""
        yield f"{self.state:8} {self.name}: {self.detail}"
        if self.state != "ok":
            yield f"{'':8} -> {self.cure}"
