import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zeroweave.integrations.hf import Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (64, 16))]

arguments = TrainingArguments(
    output_dir="out",
    zeroweave={"stage": 3},
    max_steps=8,
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model("out/final")
