"""Small fills of a captured graph: kernels, where libraries asked for memset nodes.

cuBLAS and cuDNN clear a counter of four bytes in front of nearly every kernel. A memset node between two kernels of a
graph costs an H200 8.8 us, an edge between two kernels 0.5 us (docs/performance.md).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, Final

import torch

_MOST_WORDS: Final = 1024
"""As many as threads of one block: each writes one."""
_KERNEL: Final = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 at, .param .u32 word)
{
    .reg .b32 %word, %thread;
    .reg .b64 %at, %offset;
    ld.param.u64 %at, [at];
    ld.param.u32 %word, [word];
    cvta.to.global.u64 %at, %at;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %offset, %thread, 4;
    add.s64 %at, %at, %offset;
    st.global.u32 [%at], %word;
    ret;
}
"""
_REPEATED: Final = {1: 0x01010101, 2: 0x00010001, 4: 1}
"""What makes a word of four bytes of an element, by the element's bytes."""


class Fills:
    """Changes the small memset nodes of graphs into kernel nodes, on one device."""

    def __init__(self, driver: Any) -> None:
        """`driver`: cuda.bindings.driver. For the device that is current.

        Raises:
            RuntimeError: the driver refuses the kernel.
        """
        self._driver = driver
        # Names of its calls that take edges with data: those of CUDA 12, which has others without, and of 13.
        self._before = getattr(driver, "cuGraphNodeGetDependencies_v2", driver.cuGraphNodeGetDependencies)
        self._behind = getattr(driver, "cuGraphNodeGetDependentNodes_v2", driver.cuGraphNodeGetDependentNodes)
        self._join = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)
        (module,) = self._asked(driver.cuModuleLoadData(_KERNEL))  # stays loaded as long as the process
        (self._kernel,) = self._asked(driver.cuModuleGetFunction(module, b"fill"))

    @classmethod
    def on(cls, device: torch.device) -> Fills | None:
        """None without the bindings of CUDA's driver, which PyTorch's builds for CUDA bring, and where the driver does
        not know the kernel: graphs stay as they are captured then.
        """
        try:
            from cuda.bindings import driver
        except ImportError:
            return None
        with torch.cuda.device(device), suppress(RuntimeError):
            torch.cuda.synchronize(device)  # its context is current then
            return cls(driver)
        return None

    def replace(self, graph: int) -> int:
        """In a graph that is not instantiated yet, by its handle. How many nodes were changed.

        The kernel writes the same bytes, behind the same nodes and before the same.

        Raises:
            RuntimeError: the driver refuses. The graph may be changed in part, and is not to be used.
        """
        driver = self._driver
        handle = driver.CUgraph(graph)
        _, count = self._asked(driver.cuGraphGetNodes(handle))
        nodes, _ = self._asked(driver.cuGraphGetNodes(handle, count))
        memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
        changed = 0
        for node in nodes:
            (kind,) = self._asked(driver.cuGraphNodeGetType(node))
            if kind == memset:
                changed += self._replaced(handle, node)
        return changed

    def _replaced(self, graph: Any, node: Any) -> bool:
        driver = self._driver
        (asked,) = self._asked(driver.cuGraphMemsetNodeGetParams(node))
        words, rest = divmod(asked.width * asked.elementSize, 4)
        at = int(asked.dst)
        if asked.height != 1 or rest or at % 4 or not 0 < words <= _MOST_WORDS:
            return False
        before, behind = self._around(self._before, node), self._around(self._behind, node)
        if before is None or behind is None:
            return False
        made = driver.CUDA_KERNEL_NODE_PARAMS()
        made.func = self._kernel
        made.gridDimX = made.gridDimY = made.gridDimZ = made.blockDimY = made.blockDimZ = 1
        made.blockDimX = words
        made.kernelParams = ((at, asked.value * _REPEATED[asked.elementSize]), (ctypes.c_uint64, ctypes.c_uint32))
        (kernel,) = self._asked(driver.cuGraphAddKernelNode(graph, before, len(before), made))
        if behind:
            plain = [driver.CUgraphEdgeData() for _ in behind]
            self._asked(self._join(graph, [kernel] * len(behind), behind, plain, len(behind)))
        self._asked(driver.cuGraphDestroyNode(node))
        return True

    def _around(self, ask: Any, node: Any) -> list[Any] | None:
        """The nodes at the other ends of the edges on one side. None if an edge is no plain one: it stays as it is."""
        *_, count = self._asked(ask(node))
        if not count:
            return []
        nodes, edges, _ = self._asked(ask(node, count))
        return list(nodes) if not any(edge.type or edge.from_port or edge.to_port for edge in edges) else None

    def _asked(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the driver has answered behind its error code."""
        code, *values = answer
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"small fills of a graph: CUDA's driver answers {code.name}")
        return tuple(values)
