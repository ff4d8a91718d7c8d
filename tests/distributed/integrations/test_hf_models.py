"""Adapters and generation on an engine, beside the libraries' own runs; and what is refused."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", minversion="1.15", reason="transformers' Trainer needs accelerate")

import torch
import torch.distributed as dist
import transformers

import zeroweave as zw
from tests.distributed.integrations import trainers
from tests.distributed.integrations.trainers import apart, config, equal, launched, ours, said, theirs, weights, whole
from tests.support.harness import Pools
from zeroweave.errors import ZeroweaveError
from zeroweave.integrations import hf

pytestmark = pytest.mark.matrix

WORLDS = pytest.mark.parametrize("world", [1, 2])


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    base = trainers.llama()
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def with_adapters(folder: str) -> dict[str, Any]:
    from peft import PeftModel

    with launched(folder):
        library = theirs(adapted())
        library.train()
        sharded = ours(
            config(3, "aot_eager"),
            adapted(),
            eval_strategy="steps",
            save_strategy="steps",
        )
        sharded.train()
        found = whole(sharded)
        sharded.save_model("final")
        resumed = ours(config(3, "aot_eager"), adapted())
        resumed.train(resume_from_checkpoint="out/checkpoint-10")
        dist.barrier()
        loaded = dict(PeftModel.from_pretrained(trainers.llama(), str(Path("final").resolve())).named_parameters())
        made = {
            "apart": apart(found, library.model.state_dict()),
            "moved": apart(found, adapted().state_dict()),
            "files": sorted(path.name for path in Path("final").glob("*.safetensors")),
            "loaded": equal(found, loaded),
            "resumed": equal(found, whole(resumed)),
        }
        sharded.engine.destroy()
        resumed.engine.destroy()
        return made


@WORLDS
def test_adapters_train_are_saved_and_resumed(pools: Pools, tmp_path: Path, world: int) -> None:
    pytest.importorskip("peft")
    for found in pools(world).run(with_adapters, str(tmp_path)):
        assert found["apart"] <= 1e-6 < 1e-3 < found["moved"]
        assert found["files"] == ["adapter_model.safetensors"] and found["loaded"] and found["resumed"]


def with_a_head(folder: str) -> dict[str, Any]:
    """Adapters beside a layer that is trained as a whole, which PEFT reads from the model when it saves."""
    from peft import LoraConfig, PeftModel, get_peft_model

    with launched(folder):
        torch.manual_seed(1)
        adapters = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        sharded = ours(config(3, "eager"), get_peft_model(trainers.llama(), adapters), max_steps=3)
        sharded.train()
        sharded.save_model("final")
        dist.barrier()
        loaded = dict(PeftModel.from_pretrained(trainers.llama(), str(Path("final").resolve())).named_parameters())
        found = whole(sharded)
        sharded.engine.destroy()
        head = "base_model.model.lm_head.modules_to_save.default.weight"
        return {
            "loaded": equal(found, loaded),
            "moved": apart({head: found[head]}, {head: trainers.llama().lm_head.weight}),
        }


def test_layers_beside_adapters_are_saved(pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for found in pools(2).run(with_a_head, str(tmp_path)):
        assert found["loaded"] and found["moved"] > 1e-4


def with_a_head_in_a_loop(folder: str) -> float:
    """The same in a loop of one's own, as docs/lora.md has it: how far the logits of what was saved are off."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(trainers.llama(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tokens = torch.arange(16).view(2, 8)
    with zw.initialize(
        model, torch.optim.AdamW(trained, lr=1e-2), {"stage": 3, "compile": {"enabled": False}}
    ) as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        with torch.no_grad():
            logits = engine(input_ids=tokens).logits
        with engine.full_on_rank_0():
            if engine.rank == 0:
                model.save_pretrained(folder)
        dist.barrier()
    loaded = PeftModel.from_pretrained(trainers.llama(), folder)
    with torch.no_grad():
        return float((loaded(input_ids=tokens).logits - logits).abs().max())


def test_layers_beside_adapters_are_saved_by_peft_itself(pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert pools(2).run(with_a_head_in_a_loop, str(tmp_path)) == [0.0, 0.0]


def refused_adapters(folder: str) -> list[str]:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    prompt = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    written = LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"], task_type="CAUSAL_LM")
    told = []
    with launched(folder):
        for adapter in (prompt, written):
            with pytest.raises(zw.ConfigError) as refused:
                ours(config(3, "eager"), get_peft_model(trainers.llama(), adapter)).train()
            told.append(str(refused.value))
    return told


def test_adapters_that_an_engine_cannot_have_are_refused(pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    prompts, written = pools(1).run(refused_adapters, str(tmp_path))[0]
    assert "peft's PromptTuningConfig" in prompts and "peft's target_parameters" in written


def with_experts(folder: str) -> dict[str, Any]:
    with launched(folder):
        library = theirs(trainers.mixture(), max_steps=8)
        library.train()
        sharded = ours(config(3, "aot_eager"), trainers.mixture(), max_steps=8)
        sharded.train()
        sharded.save_model("final")
        found = whole(sharded)
        sharded.engine.destroy()
        read = weights("final")
        with zw.load_pretrained("final", {"stage": 3}) as engine, engine.full_parameters() as full:
            sharded_again = equal(found, {name: value.detach() for name, value in full.items()})
        return {
            "apart": apart(found, library.model.state_dict()),
            "moved": apart(found, trainers.mixture().state_dict()),
            "loaded": equal(found, {name: read[name] for name in found}) and sharded_again,
        }


def test_a_mixture_trains_and_its_files_are_read_again(pools: Pools, tmp_path: Path) -> None:
    for found in pools(2).run(with_experts, str(tmp_path)):
        assert found["apart"] <= 1e-6 < 1e-3 < found["moved"]
        assert found["loaded"]


class Pairs(trainers.Sentences):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index][:8]}


def translator() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens, dropout_rate=0.0))


def generated(folder: str) -> tuple[float, bool, list[float]]:
    with launched(folder):
        more = {"predict_with_generate": True, "generation_max_length": 10, "generation_num_beams": 2, "max_steps": 5}
        runs = []
        for trainer, arguments in (
            (transformers.Seq2SeqTrainer, said(transformers.Seq2SeqTrainingArguments, **more)),
            (hf.Seq2SeqTrainer, said(hf.Seq2SeqTrainingArguments, **more, zeroweave=config(3, "eager"))),
        ):
            run = trainers.quiet(trainer(translator(), arguments, train_dataset=Pairs(64), eval_dataset=Pairs(7)))
            run.train()
            runs.append((run, run.predict(Pairs(7)).predictions, run.evaluate()["eval_loss"]))
        (library, wanted, loss), (sharded, got, sharded_loss) = runs
        found = apart(whole(sharded), library.model.state_dict())
        sharded.engine.destroy()
        return found, wanted.shape == got.shape and bool((wanted == got).all()), [loss, sharded_loss]


@WORLDS
def test_prediction_by_generating_at_stage_3(pools: Pools, tmp_path: Path, world: int) -> None:
    for found, same, losses in pools(world).run(generated, str(tmp_path)):
        assert found <= 1e-6 and same
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


REFUSED = {
    "fsdp= with zeroweave": {"fsdp": "full_shard"},
    "deepspeed= with zeroweave": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "torch_compile= with zeroweave": {"torch_compile": True},
    "jit_mode_eval= with zeroweave": {"jit_mode_eval": True},
    "bf16_full_eval= with zeroweave": {"bf16_full_eval": True},
    "auto_find_batch_size= with zeroweave": {"auto_find_batch_size": True},
    "enable_jit_checkpoint= with zeroweave": {"enable_jit_checkpoint": True},
    "save_on_each_node= with zeroweave": {"save_on_each_node": True},
    "ddp_bucket_cap_mb= with zeroweave": {"ddp_bucket_cap_mb": 25},
    "apex with zeroweave": {"half_precision_backend": "apex", "fp16": True},
    "load_best_model_at_end= with save_only_model=": {"load_best_model_at_end": True, "save_only_model": True},
    "'gradient_clipping' in zeroweave=: max_grad_norm=": {"zeroweave": {"gradient_clipping": 1.0}},
    "'gradient_accumulation_steps' in zeroweave=": {"zeroweave": {"gradient_accumulation_steps": 2}},
    "'checkpoint' in zeroweave=": {"zeroweave": {"checkpoint": {"keep_last": 2}}},
    "did you mean 'stage'": {"zeroweave": {"sage": 2}},
    "say one": {"bf16": True, "zeroweave": {"precision": {"autocast": "float16"}}},
    "element-wise": {"optim": "adafactor"},
    "there is no engine yet": {},
}
"""Settings of a Trainer, by what the error that they lead to says."""
OF_OTHER_VERSIONS = {"jit_mode_eval", "half_precision_backend", "enable_jit_checkpoint"}
"""Arguments that not every transformers has."""


def _known() -> dict[str, dict[str, Any]]:
    has = {field.name for field in fields(transformers.TrainingArguments)}
    return {expected: more for expected, more in REFUSED.items() if not more.keys() & OF_OTHER_VERSIONS - has}


def refusals(folder: str) -> dict[str, str]:
    told = {}
    for expected, more in _known().items():
        with launched(folder):
            try:
                trainer = ours(**{"zeroweave": {}, **more})
                _ = trainer.train() if more else trainer.engine
            except ZeroweaveError as error:
                told[expected] = str(error)
    with launched(folder):
        try:
            hf.Trainer(trainers.llama(), said(transformers.TrainingArguments), train_dataset=trainers.Sentences(4))
        except ZeroweaveError as error:
            told["args is a TrainingArguments without zeroweave="] = str(error)
        try:
            hf.Trainer(trainers.llama(), said(hf.TrainingArguments, zeroweave={}), optimizers=([], None))
        except ZeroweaveError as error:
            told["several, or a WholeMatrices, go with zeroweave.initialize or Accelerate"] = str(error)
    return told


def test_what_contradicts_the_engine_is_refused_by_name(pools: Pools, tmp_path: Path) -> None:
    for told in pools(1).run(refusals, str(tmp_path)):
        assert len(told) == len(_known()) + 2
        for expected, message in told.items():
            assert expected in message, (expected, message)


def by_position(folder: str) -> bool:
    """A Trainer that is given all up to its optimizers by their places, as transformers has them."""
    with launched(folder):
        model = trainers.llama()
        optimizer = torch.optim.AdamW(model.parameters())
        places = [*signature(transformers.Trainer).parameters]
        passed = {"model": model, "args": said(hf.TrainingArguments, zeroweave={}), "optimizers": (optimizer, None)}
        trainer = hf.Trainer(*(passed.get(name) for name in places[: places.index("optimizers") + 1]))
        return trainer.optimizer is optimizer


def test_arguments_may_be_given_by_their_places(pools: Pools, tmp_path: Path) -> None:
    assert pools(1).run(by_position, str(tmp_path)) == [True]


def parsed(folder: str) -> list[Any]:
    with launched(folder):
        Path(folder, "zeroweave.toml").write_text("stage = 1\n")
        parser = transformers.HfArgumentParser(hf.TrainingArguments)
        told = ['{"stage": 2}', "zeroweave.toml", None]
        found = []
        for each in told:
            line = ["--output_dir", "out", "--use_cpu", "true", *(["--zeroweave", each] if each else [])]
            (arguments,) = parser.parse_args_into_dataclasses(line)
            found.append(arguments.to_dict()["zeroweave"])
        found.append(said(hf.TrainingArguments, zeroweave=zw.Config(stage=3)).zeroweave)
        return found


def test_the_config_may_come_from_a_command_line(pools: Pools, tmp_path: Path) -> None:
    assert pools(1).run(parsed, str(tmp_path))[0] == [{"stage": 2}, {"stage": 1}, {}, {"stage": 3}]
