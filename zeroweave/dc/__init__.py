"""The runtime by name, for those who bring their own compiler pass. See docs/runtime.md.

The functions here act on one default `Runtime`, which `init` makes and `cleanup` ends. Runtimes over
other groups can be made beside it; a graph id belongs to one Runtime, and the operators of `torch.ops.zeroweave`
find it by that id.
"""

from zeroweave.config import RuntimeConfig
from zeroweave.dc.functions import (
    add_free_tensors,
    cleanup,
    enable_profiling,
    end_forward,
    free_tensors,
    inductor_options,
    init,
    install_ops,
    is_profiling,
    lazy_init_symm_memory,
    register_graph_z1,
    register_graph_z2,
    register_graph_z3,
    register_param,
    register_z3_param,
    reset,
    start_backward,
    start_forward,
    take_gradients,
    update_param_grad_buffer,
    zero_grad,
)
from zeroweave.dc.operators import (
    allgather_param,
    end_backward,
    prefetch_params_fused,
    reduce_grad,
    release_param,
    wait_allgather,
)
from zeroweave.dc.runtime import Runtime, runtime_of
from zeroweave.dc.targets import GradientPartition

__all__ = [
    "GradientPartition",
    "Runtime",
    "RuntimeConfig",
    "add_free_tensors",
    "allgather_param",
    "cleanup",
    "enable_profiling",
    "end_backward",
    "end_forward",
    "free_tensors",
    "inductor_options",
    "init",
    "install_ops",
    "is_profiling",
    "lazy_init_symm_memory",
    "prefetch_params_fused",
    "reduce_grad",
    "register_graph_z1",
    "register_graph_z2",
    "register_graph_z3",
    "register_param",
    "register_z3_param",
    "release_param",
    "reset",
    "runtime_of",
    "start_backward",
    "start_forward",
    "take_gradients",
    "update_param_grad_buffer",
    "wait_allgather",
    "zero_grad",
]
