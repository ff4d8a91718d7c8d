"""The private names of PyTorch that zeroweave uses: one file for each subsystem of PyTorch.

Each is a small function or alias with its reason, so that a release that moves a name breaks one file here and
one test in `tests/torch_private/`, which run on the oldest and the newest supported version. No module outside
touches a name that starts with an underscore or lives under `torch._*`. Supported: 2.11 to 2.13.
Imports that are slow (Inductor) or that pull in the compiler stay inside the functions.
"""

from zeroweave._torch.aot import aot_base as aot_base
from zeroweave._torch.aot import aot_gradient_of as aot_gradient_of
from zeroweave._torch.aot import aot_metadata as aot_metadata
from zeroweave._torch.aot import aot_partition as aot_partition
from zeroweave._torch.aot import aot_position as aot_position
from zeroweave._torch.aot import aot_saved as aot_saved
from zeroweave._torch.aot import dynamo_backend as dynamo_backend
from zeroweave._torch.aot import keep_random_numbers as keep_random_numbers
from zeroweave._torch.autograd import accumulates as accumulates
from zeroweave._torch.autograd import at_end_of_backward as at_end_of_backward
from zeroweave._torch.autograd import checkpoint_segment as checkpoint_segment
from zeroweave._torch.autograd import current_graph_task as current_graph_task
from zeroweave._torch.autograd import recomputing as recomputing
from zeroweave._torch.distributed import coalescing as coalescing
from zeroweave._torch.distributed import has_symmetric_memory as has_symmetric_memory
from zeroweave._torch.distributed import new_process_group as new_process_group
from zeroweave._torch.distributed import symmetric_empty as symmetric_empty
from zeroweave._torch.distributed import symmetric_rendezvous as symmetric_rendezvous
from zeroweave._torch.dynamo import compile_with_limit as compile_with_limit
from zeroweave._torch.dynamo import dynamo_attempts as dynamo_attempts
from zeroweave._torch.dynamo import dynamo_backend_error as dynamo_backend_error
from zeroweave._torch.dynamo import dynamo_entries as dynamo_entries
from zeroweave._torch.dynamo import dynamo_example as dynamo_example
from zeroweave._torch.dynamo import dynamo_frame_seconds as dynamo_frame_seconds
from zeroweave._torch.dynamo import dynamo_graph_breaks as dynamo_graph_breaks
from zeroweave._torch.dynamo import dynamo_operator_error as dynamo_operator_error
from zeroweave._torch.dynamo import keep_from_dynamo as keep_from_dynamo
from zeroweave._torch.dynamo import module_runner as module_runner
from zeroweave._torch.foreach import foreach_add_ as foreach_add_
from zeroweave._torch.foreach import foreach_copy_ as foreach_copy_
from zeroweave._torch.foreach import foreach_maxima as foreach_maxima
from zeroweave._torch.foreach import foreach_norms as foreach_norms
from zeroweave._torch.fx import boxed as boxed
from zeroweave._torch.fx import map_tensors as map_tensors
from zeroweave._torch.fx import mark_boxed as mark_boxed
from zeroweave._torch.fx import operator_schema as operator_schema
from zeroweave._torch.inductor import inductor_cache_hits as inductor_cache_hits
from zeroweave._torch.inductor import inductor_compile as inductor_compile
from zeroweave._torch.inductor import inductor_decompositions as inductor_decompositions
from zeroweave._torch.inductor import inductor_lock_folder as inductor_lock_folder
from zeroweave._torch.inductor import inductor_partition as inductor_partition
from zeroweave._torch.inductor import inductor_reads_first as inductor_reads_first
from zeroweave._torch.inductor import inductor_settings as inductor_settings
from zeroweave._torch.modules import child_modules as child_modules
from zeroweave._torch.modules import forward_pre_hooks as forward_pre_hooks
from zeroweave._torch.modules import is_compiled_function as is_compiled_function
from zeroweave._torch.modules import is_compiled_in_place as is_compiled_in_place
from zeroweave._torch.modules import parameter_entries as parameter_entries
from zeroweave._torch.modules import refresh_rnn_weights as refresh_rnn_weights
from zeroweave._torch.modules import watch_rnn_weights as watch_rnn_weights
from zeroweave._torch.optimizers import has_step_hooks as has_step_hooks
from zeroweave._torch.optimizers import is_step_replaced as is_step_replaced
from zeroweave._torch.optimizers import step_unheard as step_unheard
from zeroweave._torch.optimizers import without_hooks as without_hooks
from zeroweave._torch.storages import lent as lent
from zeroweave._torch.storages import owners as owners
from zeroweave._torch.storages import place_key as place_key
from zeroweave._torch.storages import storage_key as storage_key
from zeroweave._torch.storages import storage_use_count as storage_use_count
from zeroweave._torch.storages import use_count as use_count
from zeroweave._torch.storages import version as version
from zeroweave._torch.storages import view_base as view_base
from zeroweave._torch.tensors import exchange as exchange
from zeroweave._torch.tensors import has_post_accumulate_hooks as has_post_accumulate_hooks
from zeroweave._torch.tensors import has_tensor_hooks as has_tensor_hooks
from zeroweave._torch.tensors import mark_as_parameter as mark_as_parameter
from zeroweave._torch.tensors import metadata_getters as metadata_getters
from zeroweave._torch.tensors import without_torch_function as without_torch_function
from zeroweave._torch.tensors import wrapper_like as wrapper_like
