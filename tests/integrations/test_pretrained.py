"""Files whose tensors transformers 5 renames, merges or splits as it loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zeroweave.errors import ParameterError, UnsupportedError
from zeroweave.integrations.pretrained import ConvertedWeights, converted

if TYPE_CHECKING:
    import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def merged() -> transformers.PreTrainedModel:
    """Of 11 experts, so that their order is not that of their names."""
    import transformers

    experts = {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **experts, num_key_value_heads=1))


def split() -> transformers.PreTrainedModel:
    """Queries, keys and values are one tensor in the files."""
    import transformers

    return transformers.NomicBertForMaskedLM(transformers.NomicBertConfig(**SIZES))


def with_buffer() -> transformers.PreTrainedModel:
    """The router's correction is a buffer."""
    import transformers

    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(**SIZES, **experts, **heads, first_k_dense_replace=0, num_key_value_heads=2)
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.arange(4.0))
    return model


@pytest.fixture(autouse=True)
def needed() -> None:
    """Not where this is imported: a run without these tests need not wait for transformers."""
    pytest.importorskip("transformers.conversion_mapping", reason="transformers 4 has its weights as they are in files")


MODELS = {"merged": merged, "split": split, "with a buffer": with_buffer}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[transformers.PreTrainedModel, Path]]:
    torch.manual_seed(0)
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path)
    yield model, tmp_path


def empty(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return type(model)(model.config)


def test_parameters_are_what_transformers_makes_of_the_files(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    target = empty(model)
    weights = converted(target, folder)
    assert isinstance(weights, ConvertedWeights)
    weights.give_buffers()
    for name, expected in model.named_parameters():
        weights(name, filled := torch.full_like(expected, torch.nan))
        assert torch.equal(filled, expected), name
    kept = {name: buffer for name, buffer in target.named_buffers() if name in model.state_dict()}
    assert all(torch.equal(buffer, model.state_dict()[name]) for name, buffer in kept.items())


def test_a_model_that_is_not_empty_gets_them_as_well(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    other = type(model)(model.config)
    weights = converted(other, folder)
    assert weights is not None
    weights.give_parameters()
    weights.give_buffers()
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_files_that_are_as_the_model_is_are_read_as_they_are(tmp_path: Path) -> None:
    import transformers

    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for model, form in ((merged(), {"save_original_format": False}), (llama, {})):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder, **form)
        assert converted(empty(model), folder) is None


def test_an_old_transformers_5_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = merged()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    with pytest.raises(UnsupportedError, match=r"transformers 5.3.0 is too old .* 'transformers>=5.17,<6'"):
        converted(empty(model), tmp_path)


def test_what_is_missing_or_cut_is_an_error_with_its_name(tmp_path: Path) -> None:
    model = merged()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.0.mlp.experts.10.down_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != expert}, file)
    weights = converted(empty(model), tmp_path)
    assert weights is not None
    merged_name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ParameterError, match=rf"{merged_name}: \[10, 16, 8\] instead of \[11, 16, 8\]"):
        weights(merged_name, torch.empty(11, 16, 8))

    save_file({key: value for key, value in tensors.items() if "down_proj" not in key}, file)
    with pytest.raises(ParameterError, match=f"missing: {merged_name}"):
        converted(empty(model), tmp_path)
