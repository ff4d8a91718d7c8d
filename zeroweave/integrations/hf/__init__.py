"""transformers' Trainer on zeroweave's engine: `from zeroweave.integrations.hf import Trainer, TrainingArguments`."""

from zeroweave.integrations.hf.arguments import Seq2SeqTrainingArguments, TrainingArguments
from zeroweave.integrations.hf.trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]
