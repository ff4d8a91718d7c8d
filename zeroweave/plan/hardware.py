"""GPUs and what connects them, by their data sheets, and how much of that programs get, by default or as measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from zeroweave.errors import EngineError, first_problem
from zeroweave.schedule import Line
from zeroweave.schedule.passes.memory_by_event import TAX


@dataclass(frozen=True)
class Gpu:
    """One GPU. Bytes, bytes per second, and floating-point operations per second (dense).

    memory: as CUDA says, up to 6 % more than the data sheet's. half: of bfloat16 and float16 matmuls, single: of
    float32 ones. inside: NVLink or PCIe, one direction. between: the network, for each GPU of a node. host: to and from
    host memory, one direction. ranks_per_node: GPUs of a node.
    """

    memory: int
    bandwidth: float
    half: float
    single: float
    inside: float
    between: float
    host: float
    ranks_per_node: int = 8


GPUS: Final = MappingProxyType(
    {
        # NVIDIA A100 Tensor Core GPU data sheet (80GB SXM, PCIe Gen4); DGX A100 data sheet (eight 200 Gb/s adapters)
        "a100": Gpu(80_900 << 20, 2.039e12, 312e12, 19.5e12, 300e9, 25e9, 32e9),
        # NVIDIA H100 Tensor Core GPU data sheet (SXM, PCIe Gen5; half of its rates with sparsity); DGX H100 (400 Gb/s)
        "h100": Gpu(80_900 << 20, 3.35e12, 989.5e12, 67e12, 450e9, 50e9, 64e9),
        # NVIDIA H200 Tensor Core GPU data sheet (SXM, PCIe Gen5; half of its rates with sparsity); DGX H200 (400 Gb/s)
        "h200": Gpu(143_100 << 20, 4.8e12, 989.5e12, 67e12, 450e9, 50e9, 64e9),
    }
)

_CODED: Final = 77e9
"""Elements a second that updates of compact states code on an H200: 16 ms for the 1.24e9 of Llama-1B, whose step takes
31.0 ms in place of 22.5 (benchmarks/README.md), where the bytes of the update alone would take 3.6 in place of 7.6."""


@dataclass(frozen=True)
class Efficiency:
    """The share of what a data sheet says that programs get, and what they wait for. From 0 to 1, and seconds.

    matmul, memory and inside are from H200s: 780 of 989 TFLOP/s in large matmuls, 4.24 of 4.8 TB/s in copies, 304 of
    450 GB/s in an all-gather of 256 MiB. attention, between and host are guesses. contention: by how many seconds
    computation is longer for each second of a concurrent collective. kernel: from one kernel to the next.
    launch: of a collective; hop_inside, hop_between: from one rank of a ring to the next.
    """

    matmul: float = 0.79
    attention: float = 0.5
    memory: float = 0.88
    inside: float = 0.68
    between: float = 0.8
    host: float = 0.8
    contention: float = TAX
    kernel: float = 3e-6
    launch: float = 2e-5
    hop_inside: float = 3e-6
    hop_between: float = 1.5e-5


@dataclass(frozen=True)
class Hardware:
    """What a rank computes with, and what it sends through."""

    gpu: Gpu
    efficiency: Efficiency

    def compute(self, operations: float, nbytes: float, itemsize: int, attention: bool = False) -> float:
        """Seconds of a kernel: of its arithmetic or of its traffic with memory, whichever takes longer."""
        share = self.efficiency.attention if attention else self.efficiency.matmul
        peak = self.gpu.half if itemsize <= 2 else self.gpu.single
        return self.efficiency.kernel + max(operations / (peak * share), self.traffic(nbytes))

    def coded(self, elements: int, nbytes: float) -> float:
        """Seconds of a kernel that updates so many elements of compact states.

        Its arithmetic is that of codes: on other GPUs than the one that it was measured on by their rate of float32.
        """
        rate = _CODED * self.gpu.single / GPUS["h200"].single
        return self.efficiency.kernel + max(elements / rate, self.traffic(nbytes))

    def traffic(self, nbytes: float) -> float:
        """Seconds that so many bytes take to or from memory."""
        return nbytes / (self.gpu.bandwidth * self.efficiency.memory)

    def copy(self, nbytes: float) -> float:
        """Seconds of a copy between the device and host memory."""
        return self.efficiency.kernel + nbytes / (self.gpu.host * self.efficiency.host)

    def collective(self, world: int, stride: int = 1) -> Line:
        """An all-gather or a reduce-scatter of a flat, by its bytes, on `world` ranks of nodes that are full.

        A ring, as NCCL has it: (world - 1) / world of the flat passes through each rank, and through each node's
        adapters together. It moves at the pace of the slower of the two. `stride`: from each rank to the next one; so
        many rings move at the same time, and those of a node share its adapters.
        """
        if world == 1:
            return Line()
        gpu, share = self.gpu, self.efficiency
        nodes = min(world, -(-world * stride // gpu.ranks_per_node))
        pace = gpu.inside * share.inside
        if nodes > 1:
            pace = min(pace, gpu.between * share.between * gpu.ranks_per_node / min(stride, gpu.ranks_per_node))
        alpha = share.launch + (world - nodes) * share.hop_inside + (nodes - 1) * share.hop_between
        return Line(alpha, (world - 1) / world / pace)


_RateName = Annotated[str, Field(pattern="^(matmul|attention|memory|inside|between|host)$")]
_SecondsName = Annotated[str, Field(pattern="^(contention|kernel|launch|hop_inside|hop_between)$")]


@dataclass(frozen=True)
class Calibration:
    """What was measured, on the slowest of `ranks` ranks on `hosts` machines, each on a `device`.

    rates: operations per second of "matmul" and "attention", bytes per second of "memory", "inside", "between" and
    "host". seconds: the others of `Efficiency`, under its names. What could not be measured is in neither.
    """

    device: str
    ranks: int
    hosts: int
    rates: Mapping[_RateName, Annotated[float, Field(gt=0)]]
    seconds: Mapping[_SecondsName, Annotated[float, Field(ge=0, lt=1)]]

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
        missing = [each.name for each in fields(Efficiency) if each.name not in {*self.rates, *self.seconds}]
        return found + ([f"by default: {', '.join(missing)}"] if missing else [])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """What `save` has written. EngineError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(path.read_text())
        except OSError as error:
            raise EngineError(f"[ZW903] {path}: {error.strerror}") from None
        except ValidationError as error:
            raise EngineError(
                f"[ZW903] {path} is no calibration: {first_problem(error)}; make it anew with --calibrate"
            ) from None
