import torch
from torch.utils.data import DataLoader

from zeroweave.integrations.accelerate import ZeroweaveAccelerator as Accelerator

config = {"stage": 3}
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available(), zeroweave_config=config)

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(torch.randn(64, 16), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())

accelerator.save_state("checkpoint")
