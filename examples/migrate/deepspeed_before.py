import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

data = torch.randn(8, torch.distributed.get_world_size(), 4, 16)[:, torch.distributed.get_rank()]
for batch in data.to(engine.device):
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    print("loss", loss.item())

engine.save_checkpoint("checkpoints", tag="last")
