"""Train a transformers model built from a config, on the same text as train.py, in bf16 with fp32 masters.

On two processes:  zeroweave run --nproc-per-node 2 examples/hf_finetune.py --model qwen3
On one:            python examples/hf_finetune.py

To start from weights, replace `build` by `AutoModelForCausalLM.from_pretrained(...)`; the rest stays.
It needs transformers: pip install '.[examples]' in a clone.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import zeroweave as zw
from zeroweave.demo import Text

KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def build(kind: str) -> PreTrainedModel:
    """A model of 4 layers and width 128 for text as bytes, with random weights."""
    config, model = KINDS[kind]
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return model(
        config(
            vocab_size=256, max_position_embeddings=128, use_cache=False, tie_word_embeddings=False, **sizes, **heads
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=KINDS, default="llama")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--params", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--lower", choices=("inductor", "aot_eager"), default="inductor")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = build(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    config = {
        "stage": options.stage,
        "gradient_clipping": 1.0,
        "precision": {"params": options.params, "reduce": "float32"},
        "compile": {"lower": options.lower},
    }
    with zw.initialize(model, optimizer, config=config, lr_scheduler=schedule) as engine:
        text = Text(rank=engine.rank, world=engine.world, device=engine.device)
        for step in range(options.steps):
            loss = engine(**text.step(step)).loss
            engine.backward(loss)
            engine.step()
            if engine.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
                print(
                    f"step {step:4}  loss {loss.item():.3f}  norm {engine.get_global_grad_norm():.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
