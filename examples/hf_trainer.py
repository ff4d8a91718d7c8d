"""Train a transformers model with transformers' Trainer, on the same text as train.py.

On two processes:  zeroweave run --nproc-per-node 2 examples/hf_trainer.py
On one:            python examples/hf_trainer.py
Go on after a stop: the same with --resume

It needs transformers and accelerate: pip install '.[examples]' in a clone.
"""

import argparse

import torch
from hf_finetune import build

from zeroweave.demo import Text
from zeroweave.integrations.hf import Trainer, TrainingArguments


class Pieces(torch.utils.data.Dataset):
    """`count` pieces of the text, each of 128 bytes."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = Text(batch=count, seed=seed).step(0)["input_ids"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lower", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=options.output_dir,
        zeroweave={"stage": options.stage, "compile": {"lower": options.lower}},
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        warmup_steps=10,
        max_steps=options.steps,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        load_best_model_at_end=True,
        report_to=[],
    )
    torch.manual_seed(0)
    trainer = Trainer(
        build(options.model), arguments, train_dataset=Pieces(512, seed=1), eval_dataset=Pieces(32, seed=2)
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.output_dir}/final")  # on all ranks; `from_pretrained` loads it


if __name__ == "__main__":
    main()
