"""Families of transformers' models on one GPU: is training by zeroweave exact, with CUDA graphs and without?

    python -m benchmarks.families --workers 6 --variants plain lengths+mask checkpointing gas2 train_step

Each family is a small model in float32, trained by plain PyTorch and by zeroweave on the same batches. A row has how
far its parameters are from plain PyTorch's without graphs and with them (largest relative norm), and how many calls
were graphs. A row fails where graphs are farther away than twice the run without them, or where nothing was a graph.

Models with ReLU or routed experts (opt, t5, gptoss, qwen3moe) amplify rounding: plain PyTorch with weights changed by
1e-7 can end 4.5e-2 (opt) or 3.5e-3 (t5) away after 36 steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SHARED = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
DECODER = {**SHARED, "num_key_value_heads": 2}
WITH_HEAD = {**DECODER, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTHS = (32, 32, 48, 32, 40, 48)
FLOOR = 2e-6
"""Relative norms below this are rounding."""
SCALE = 1e-3
"""Norms of parameters far below this are rounding."""

# family: (config class, model class, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", WITH_HEAD),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**WITH_HEAD, "sliding_window": 32}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**DECODER, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", DECODER),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**DECODER, **EXPERTS, "num_local_experts": 8}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**WITH_HEAD, **EXPERTS, "num_experts": 16, "moe_intermediate_size": 64},
    ),
    "gptoss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**WITH_HEAD, **EXPERTS, "num_local_experts": 8, "sliding_window": 32},
    ),
    "deepseekv3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **SHARED,
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "moe_intermediate_size": 64,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": 512,
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SHARED),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 512, "hidden_size": 128, "n_layer": 3, "n_head": 4}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 128,
            "dropout": 0.0,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "state_size": 8},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "expand": 2,
            "chunk_size": 32,
        },
    ),
    "rwkv": (
        "RwkvConfig",
        "RwkvForCausalLM",
        {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "attention_hidden_size": 128},
    ),
    "falconh1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **DECODER,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
    "qwen3next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **WITH_HEAD,
            **EXPERTS,
            "num_experts": 8,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 128,
            "d_ff": 256,
            "d_kv": 32,
            "num_layers": 3,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 128,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 256,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**SHARED, **NO_DROPOUT}),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {
            **SHARED,
            "intermediate_size": 192,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "deberta": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**SHARED, **NO_DROPOUT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
}
EPS = 1e-3
"""Adam's. By the default, gradients that are zero but for rounding move their parameters as far as any other."""
STATIC = ("mamba2", "falconh1")
"""Families that PyTorch's compiler cannot take with symbolic lengths, with zeroweave or without."""
SHORT = ("rwkv",)
"""Families whose layers are loops over the tokens: PyTorch's compiler takes minutes for 32 of these."""
WORDS = ("plain", "lengths", "mask", "checkpointing", "gas2", "train_step", "dropout", "check")


def built(family: str) -> Any:
    import transformers

    config, model, settings = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).train()


def batches(family: str, words: set[str], steps: int, device: torch.device) -> Iterator[list[dict[str, Tensor]]]:
    """The micro-batches of each step."""
    gas = 2 if "gas2" in words else 1
    for step in range(steps):
        length = LENGTHS[step % len(LENGTHS)] if "lengths" in words else LENGTHS[0]
        length = length // 4 if family in SHORT else length
        micro = []
        for index in range(gas):
            generator = torch.Generator().manual_seed(1000 * step + index)
            ids = torch.randint(3, 512, (2, length), generator=generator).to(device)
            batch = {"input_ids": ids, "labels": ids.clone()}
            if "mask" in words:
                batch["attention_mask"] = torch.ones_like(ids)
                batch["attention_mask"][1, -5:] = 0
            micro.append(batch)
        yield micro


def plain(family: str, words: set[str], steps: int, device: torch.device) -> dict[str, Tensor]:
    model = prepared(built(family).to(device), words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS, fused=device.type == "cuda")
    for micro in batches(family, words, steps, device):
        for batch in micro:
            (model(**batch).loss / len(micro)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def prepared(model: Any, words: set[str]) -> Any:
    if "checkpointing" in words:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def engine(
    family: str, words: set[str], steps: int, device: torch.device, graphs: bool, lower: str
) -> tuple[dict[str, Tensor], Any]:
    import zeroweave as zw

    model = prepared(built(family), words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS, fused=device.type == "cuda")
    config = {
        "stage": 3,
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 2 if "gas2" in words else 1,
        "compile": {"cuda_graphs": graphs, "lower": lower, "dynamic": False if family in STATIC else None},
        "debug": {"check_graphs": graphs and "check" in words},
    }
    with zw.initialize(model.to(device), optimizer, config) as trained:
        for micro in batches(family, words, steps, device):
            for batch in micro:
                if "train_step" in words:
                    trained.train_step(batch)
                else:
                    trained.backward(trained(**batch).loss)
                    trained.step()
        with trained.full_parameters() as parameters:
            values = {name: p.detach().clone() for name, p in parameters.items()}
        return values, trained.stats


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative norm of a difference.

    A parameter whose gradient is zero but for rounding, such as a key's bias that starts at zero, has no scale of its
    own: `SCALE` is added to all norms.
    """
    return max(float((found[name] - p).norm() / (p.norm() + SCALE)) for name, p in wanted.items())


def row(family: str, variant: str, steps: int, lower: str) -> bool:
    """Prints the row of a family; False if it fails."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin, words = time.monotonic(), set(variant.split("+"))
    wanted = plain(family, words, steps, device)
    without, _ = engine(family, words, steps, device, False, lower)
    graphed, stats = engine(family, words, steps, device, True, lower)
    far, graphs_far = apart(without, wanted), apart(graphed, wanted)
    good = graphs_far <= max(2 * far, FLOOR) and (stats.graphed_calls > 0 or device.type == "cpu")
    checked = f"graphs and calls differ by {stats.graph_difference:.1e} " if "check" in words else ""
    eager = next(iter(stats.eager_regions.items()), "")
    print(
        f"{'holds' if good else 'FAILS'} {family:10} {variant:20} without graphs {far:.1e}, with {graphs_far:.1e}; "
        f"{stats.graphed_calls} of {stats.compiled_calls} calls graphed {stats.ungraphed_calls or ''} "
        f"{stats.eager_calls} eager {eager} {checked}{time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return good


def share(families: list[str], variants: list[str], steps: int, lower: str) -> int:
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    bad = 0
    for variant in variants:
        for family in families:
            try:
                bad += not row(family, variant, steps, lower)
            except Exception as error:
                bad += 1
                print(f"FAILS {family:10} {variant:20} {type(error).__name__}: {str(error)[:300]!r}", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--variants", nargs="+", default=["lengths+mask"], help=f"words of {', '.join(WORDS)}, with +")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--lower", default="inductor")
    asked = parser.parse_args()
    if asked.workers == 1:
        return min(share(asked.families, asked.variants, asked.steps, asked.lower), 1)
    command = [sys.executable, "-m", "benchmarks.families", "--steps", str(asked.steps), "--lower", asked.lower]
    parts = [asked.families[index :: asked.workers] for index in range(asked.workers)]
    workers = [
        subprocess.Popen([*command, "--variants", *asked.variants, "--families", *part]) for part in parts if part
    ]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
