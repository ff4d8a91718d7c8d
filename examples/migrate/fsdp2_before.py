import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

device = torch.accelerator.current_accelerator() or torch.device("cpu")
dist.init_process_group()
if device.type != "cpu":
    device = torch.device(device.type, dist.get_node_local_rank())
    torch.accelerator.set_device_index(device.index)

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

data = torch.randn(8, dist.get_world_size(), 4, 16)[:, dist.get_rank()]
for batch in data.to(device):
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())

state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
