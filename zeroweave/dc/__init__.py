"""The runtime by name, for those who bring their own compiler pass. See docs/runtime.md.

The functions here act on one default `Runtime`, which `init` makes and `cleanup` ends. A program can make more
Runtimes, over other groups. A graph id belongs to one Runtime, and the operators of `torch.ops.zeroweave` find it by
that id.
"""

from zeroweave.compile.frames import keep_package_from_dynamo
from zeroweave.config import RuntimeConfig as RuntimeConfig
from zeroweave.dc.functions import allgather_param as allgather_param
from zeroweave.dc.functions import cleanup as cleanup
from zeroweave.dc.functions import end_backward as end_backward
from zeroweave.dc.functions import free_tensors as free_tensors
from zeroweave.dc.functions import inductor_options as inductor_options
from zeroweave.dc.functions import init as init
from zeroweave.dc.functions import install_ops as install_ops
from zeroweave.dc.functions import of_default
from zeroweave.dc.functions import prefetch_params_fused as prefetch_params_fused
from zeroweave.dc.functions import reduce_grad as reduce_grad
from zeroweave.dc.functions import release_param as release_param
from zeroweave.dc.functions import wait_allgather as wait_allgather
from zeroweave.dc.runtime import Runtime as Runtime
from zeroweave.dc.runtime import runtime_of as runtime_of
from zeroweave.dc.targets import GradientPartition as GradientPartition

register_param = of_default(Runtime.register_param)
register_z3_param = of_default(Runtime.register_z3_param)
update_param_grad_buffer = of_default(Runtime.update_param_grad_buffer)
register_graph_z1 = of_default(Runtime.register_graph_z1)
register_graph_z2 = of_default(Runtime.register_graph_z2)
register_graph_z3 = of_default(Runtime.register_graph_z3)
start_forward = of_default(Runtime.start_forward)
end_forward = of_default(Runtime.end_forward)
start_backward = of_default(Runtime.start_backward)
lazy_init_symm_memory = of_default(Runtime.lazy_init_symm_memory)
take_gradients = of_default(Runtime.take_gradients)
zero_grad = of_default(Runtime.zero_grad)
enable_profiling = of_default(Runtime.enable_profiling)
is_profiling = of_default(Runtime.is_profiling)
reset = of_default(Runtime.reset)

install_ops("zeroweave")
keep_package_from_dynamo("zeroweave")
