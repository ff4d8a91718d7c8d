import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,"]
letters = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **special)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=128, **sizes))
data = Dataset.from_dict({"text": ["the cat sat on the mat. " * (1 + index % 3) for index in range(64)]})

arguments = SFTConfig(
    output_dir="out",
    max_steps=8,
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.save_model("out/final")
