"""What a machine was measured to do, as a file that plans are made by elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from zeroweave.errors import EngineError
from zeroweave.plan.hardware import GPUS, Efficiency, Gpu


@dataclass(frozen=True)
class Calibration:
    """What was measured, on the slowest of `ranks` ranks on so many `hosts`, each on a `device`.

    rates: operations per second of "matmul" and "attention", bytes per second of "memory", "inside", "between" and
    "host". seconds: the others of `Efficiency`, as they stand there. What could not be measured is in neither.
    """

    device: str
    ranks: int
    hosts: int
    rates: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def gpu(self) -> str | None:
        """The name of its data sheet; None: there is none here."""
        return next((name for name in GPUS if name in self.device.lower()), None)

    def efficiency(self, gpu: Gpu) -> Efficiency:
        """Of programs on such a GPU. What is missing has its default. EngineError where it is another GPU's."""
        sheet = {
            "matmul": gpu.half,
            "attention": gpu.half,
            "memory": gpu.bandwidth,
            "inside": gpu.inside,
            "between": gpu.between,
            "host": gpu.host,
        }
        changes: dict[str, Any] = dict(self.seconds)
        for name, rate in self.rates.items():
            changes[name] = rate / sheet[name]
            if changes[name] > 1:
                raise EngineError(
                    f"[ZW903] the calibration has {rate:.3g} a second of {name}, on {self.device}, and the data sheet "
                    f"of what is planned {sheet[name]:.3g}: name the GPU that was measured with --gpu, or its links "
                    "with --inside, --between and --host"
                )
        return replace(Efficiency(), **changes)

    def lines(self) -> list[str]:
        """What was measured and what was not, in words."""
        values = [f"{name} {rate:.3g}/s" for name, rate in self.rates.items()]
        values += [f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items()]
        where = f"{self.ranks} x {self.device}, {self.hosts} host{'s' * (self.hosts > 1)}"
        found = [f"measured on {where}: {', '.join(values)}"]
        missing = [f"{name} (takes {_TAKES[name]})" for name in _TAKES if name not in {*self.rates, *self.seconds}]
        return found + ([f"by default: {', '.join(missing)}"] if missing else [])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """What `save` has written. EngineError for anything else."""
        try:
            found = cls.read(path.read_text())
        except OSError as error:
            raise EngineError(f"[ZW903] {path}: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise EngineError(
                f"[ZW903] {path} is no calibration: {where + ': ' if where else ''}{first['msg']}"
            ) from None
        wrong = [(name, rate) for name, rate in found.rates.items() if name not in _RATES or not rate > 0]
        wrong += [(name, value) for name, value in found.seconds.items() if name not in _SECONDS or not 0 <= value < 1]
        if wrong:
            name, value = wrong[0]
            raise EngineError(f"[ZW903] {path} is no calibration: {name} is {value:g}; make it anew with --calibrate")
        return found

    @classmethod
    def read(cls, text: str) -> Calibration:
        """Of JSON. pydantic's ValidationError for anything else."""
        return TypeAdapter(cls).validate_json(text)


_TAKES: Final = MappingProxyType(
    {
        "host": "a GPU",
        "kernel": "a GPU",
        "inside": "two ranks in each node",
        "launch": "two ranks in each node",
        "hop_inside": "three ranks in each node",
        "beside": "two GPUs",
        "between": "two nodes",
        "hop_between": "two nodes",
    }
)
"""What it takes to measure each."""
_RATES: Final = frozenset({"matmul", "attention", "memory", "inside", "between", "host"})
_SECONDS: Final = frozenset(vars(Efficiency())) - _RATES
