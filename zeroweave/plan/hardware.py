"""GPUs and what connects them, by their data sheets, and how much of that programs get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

from zeroweave.errors import EngineError
from zeroweave.schedule import Line
from zeroweave.schedule.passes.room import TAX


@dataclass(frozen=True)
class Gpu:
    """One GPU. Bytes, bytes per second, and floating-point operations per second (dense).

    half: of bfloat16 and float16 matmuls, single: of float32 ones. inside: NVLink or PCIe, one direction. between:
    the network, for each GPU of a node. host: to and from host memory, one direction. ranks_per_node: GPUs of a node.
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
        "a100": Gpu(80 * 10**9, 2.039e12, 312e12, 19.5e12, 300e9, 25e9, 32e9),
        # NVIDIA H100 Tensor Core GPU data sheet (SXM, PCIe Gen5; half of its rates with sparsity); DGX H100 (400 Gb/s)
        "h100": Gpu(80 * 10**9, 3.35e12, 989.5e12, 67e12, 450e9, 50e9, 64e9),
        # NVIDIA H200 Tensor Core GPU data sheet (SXM, PCIe Gen5; half of its rates with sparsity); DGX H200 (400 Gb/s)
        "h200": Gpu(141 * 10**9, 4.8e12, 989.5e12, 67e12, 450e9, 50e9, 64e9),
    }
)

_CODED: Final = 77e9
"""Elements a second that updates of compact states code on an H200: 16 ms for the 1.24e9 of Llama-1B, whose step takes
31.0 ms in place of 22.5 (benchmarks/README.md), where the bytes of the update alone would take 3.6 in place of 7.6."""

_SHARES: Final = ("matmul", "attention", "memory", "inside", "between", "host")
"""Of what the data sheet says; the others are seconds, or seconds for each second."""


@dataclass(frozen=True)
class Efficiency:
    """The share of what a data sheet says that programs get, and what they wait for. From 0 to 1, and seconds.

    matmul, memory and inside are from H200s: 780 of 989 TFLOP/s in large matmuls, 4.24 of 4.8 TB/s in copies, 304 of
    450 GB/s in an all-gather of 256 MiB. attention, between and host are guesses. beside: by how many seconds
    computation is longer for each second of a collective that runs beside it. kernel: from one kernel to the next.
    launch: of a collective; hop_inside, hop_between: from one rank of a ring to the next.
    """

    matmul: float = 0.79
    attention: float = 0.5
    memory: float = 0.88
    inside: float = 0.68
    between: float = 0.8
    host: float = 0.8
    beside: float = TAX
    kernel: float = 3e-6
    launch: float = 2e-5
    hop_inside: float = 3e-6
    hop_between: float = 1.5e-5

    def changed(self, words: Iterable[str]) -> Efficiency:
        """With other values, each as "name=value". EngineError for what is no such word."""
        known = {each.name for each in fields(self)}
        changes = {}
        for word in words:
            name, _, text = word.partition("=")
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if name not in known or not (0 < value <= 1 if name in _SHARES else 0 <= value < 1):
                others = ", ".join(sorted(known.difference(_SHARES)))
                raise EngineError(
                    f"[ZW903] efficiency {word!r}: write name=value, with a share above 0 and up to 1 of "
                    f"{', '.join(_SHARES)}, or seconds below 1 of {others}"
                )
            changes[name] = value
        return replace(self, **changes)


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

    def collective(self, world: int) -> Line:
        """An all-gather or a reduce-scatter of a flat, by its bytes, on `world` ranks that fill nodes.

        A ring, as NCCL has it: (world - 1) / world of the flat passes through each rank, and through each node's
        adapters together. It moves at the pace of the slower of the two.
        """
        if world == 1:
            return Line()
        gpu, share = self.gpu, self.efficiency
        nodes = -(-world // gpu.ranks_per_node)
        pace = gpu.inside * share.inside
        if nodes > 1:
            pace = min(pace, gpu.between * share.between * gpu.ranks_per_node)
        alpha = share.launch + (world - nodes) * share.hop_inside + (nodes - 1) * share.hop_between
        return Line(alpha, (world - 1) / world / pace)
