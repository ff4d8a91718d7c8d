import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device = torch.accelerator.current_accelerator() or torch.device("cpu")
dist.init_process_group()
if device.type != "cpu":
    device = torch.device(device.type, dist.get_node_local_rank())

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)

data = torch.randn(8, dist.get_world_size(), 4, 16)[:, dist.get_rank()]
for batch in data.to(device):
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print("loss", loss.item())

state = model.module.state_dict()
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
