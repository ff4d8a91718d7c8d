import torch

import zeroweave as zw

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = zw.initialize(model, optimizer, {"stage": 3, "gradient_clipping": 1.0})

data = torch.randn(8, engine.world, 4, 16)[:, engine.rank]
for batch in data.to(engine.device):
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    print("loss", loss.item())

state = engine.state_dict()
if engine.rank == 0:
    torch.save(state, "model.pt")
engine.destroy()
