import torch

import zeroweave as zw

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
parts = zw.load_deepspeed(config)
engine = zw.initialize(model, parts.optimizer, parts.config)

data = torch.randn(8, engine.world, 4, 16)[:, engine.rank]
for batch in data.to(engine.device):
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    print("loss", loss.item())

engine.save("checkpoints", tag="last")
engine.destroy()
