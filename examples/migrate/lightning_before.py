import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch, index):
        loss = self.layers(batch).square().mean()
        print("loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
module, loader = Module(), DataLoader(torch.randn(64, 16), batch_size=4)
trainer = Trainer(strategy="ddp", devices=1, max_epochs=1, gradient_clip_val=1.0, logger=False)
trainer.fit(module, loader)
trainer.save_checkpoint("last.ckpt")
