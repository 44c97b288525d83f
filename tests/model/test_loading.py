"""Which models load and how, and which are refused with which message."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel

from foredraft.engine.memory_pool import MemoryPool
from foredraft.errors import ForedraftError, ModelError
from foredraft.llm import LLM
from foredraft.model import LanguageModel, LoadOptions, Read, auto_class, formats, load_model, load_tokenizer, memory
from foredraft.model.routing import routed
from foredraft.sampling import SamplingParams
from tests.model.test_architectures import read_in_chunks, sizes
from tests.model.zoo import CONTEXT, SPECIES, VOCAB_SIZE, Maker, random_model, saved

CPU = LoadOptions(device="cpu")
FLOAT32 = LoadOptions(dtype="float32", device="cpu")


@pytest.fixture
def llama(checkpoint: Maker, tmp_path: Path) -> Path:
    """A copy of a checkpoint for a test to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


def edit(directory: Path, file: str, **changes: Any) -> None:
    path = directory / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, **changes}))


def refusal(source: str | Path | PreTrainedModel, options: LoadOptions = CPU) -> str:
    """The message of the ModelError; asserts that it is one line and names the model."""
    with pytest.raises(ModelError) as caught:
        load_model(source, options)
    message = str(caught.value)
    assert isinstance(caught.value, ForedraftError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in message
    if not isinstance(source, PreTrainedModel):
        assert str(source) in message
    return message


# What loads


def test_a_hub_id_and_its_options_reach_the_library(monkeypatch: pytest.MonkeyPatch, checkpoint: Maker) -> None:
    calls = []

    def spy(owner: Any) -> None:
        original = owner.from_pretrained

        def from_pretrained(name: str, **kwargs: Any) -> Any:
            calls.append((name, kwargs))
            return original(checkpoint("llama"), **{**kwargs, "revision": None})

        monkeypatch.setattr(owner, "from_pretrained", from_pretrained)

    spy(formats.AutoConfig)
    spy(auto_class.AutoModelForCausalLM)
    options = LoadOptions(dtype="bfloat16", device="cpu", revision="v2", trust_remote_code=True)
    model = load_model("someone/some-model", options)
    assert model.traits.name == "someone/some-model"
    assert [name for name, _ in calls] == ["someone/some-model"] * 2
    assert all(kwargs["revision"] == "v2" and kwargs["trust_remote_code"] is True for _, kwargs in calls)
    assert calls[1][1]["dtype"] == torch.bfloat16


def test_the_tokenizer_is_loaded_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        formats.AutoTokenizer, "from_pretrained", lambda name, **kwargs: seen.update(name=name, **kwargs) or "tokenizer"
    )
    assert load_tokenizer("someone/some-model", LoadOptions(revision="v2", trust_remote_code=True)) == "tokenizer"
    assert seen == {"name": "someone/some-model", "revision": "v2", "trust_remote_code": True}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("float32", torch.float32),
    ],
)
def test_a_directory_loads_in_the_given_dtype(
    dtype: str | torch.dtype, expected: torch.dtype, checkpoint: Maker
) -> None:
    model = load_model(checkpoint("llama"), LoadOptions(dtype=dtype, device="cpu"))
    assert model.hf.dtype == expected
    assert model.device == torch.device("cpu")
    assert not model.hf.training
    assert model.traits.vocab_size == VOCAB_SIZE
    assert model.traits.context_len == CONTEXT
    # two layers, keys and values, two heads of 16
    assert model.traits.bytes_per_token == 2 * 2 * 2 * 16 * expected.itemsize


def test_a_model_in_memory_keeps_its_dtype() -> None:
    hf = random_model(SPECIES["llama"].config()).train()
    model = load_model(hf, LoadOptions(dtype="bfloat16"))
    assert model.hf is hf
    assert hf.dtype == torch.float32
    assert not hf.training
    assert model.traits.name == "LlamaForCausalLM"


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_float16_runs_in_bfloat16_on_a_cpu_with_a_warning(
    dtype: str, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model(SPECIES["llama"].config()).half().save_pretrained(llama)
    with caplog.at_level(logging.WARNING, "foredraft"):
        model = load_model(llama, LoadOptions(dtype=dtype, device="cpu"))
    assert model.hf.dtype == torch.bfloat16
    assert "bfloat16" in caplog.text


def test_an_unknown_dtype_is_refused(checkpoint: Maker) -> None:
    with pytest.raises(ModelError, match="dtype must be auto, float32, bfloat16, float16, not 'int3'"):
        load_model(checkpoint("llama"), LoadOptions(dtype="int3"))


def test_sharded_weights_load(checkpoint: Maker, tmp_path: Path) -> None:
    whole = load_model(checkpoint("llama"), FLOAT32)
    whole.hf.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = load_model(tmp_path, FLOAT32)
    ids = torch.arange(2, 20)[None]
    assert torch.equal(sharded.hf(ids).logits, whole.hf(ids).logits)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = SPECIES["llama"].config()
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert not any("lm_head" in name for file in tmp_path.glob("*.safetensors") for name in load_file(file))
    load_model(tmp_path, FLOAT32)


def test_every_end_id_of_the_generation_config_ends_a_text(llama: Path) -> None:
    prompt, greedy = [5, 9, 14], SamplingParams(temperature=0.0, max_tokens=12)
    free = list(LLM(llama, dtype="float32").generate(prompt, greedy)[0].outputs[0].token_ids)
    later = next(token for i, token in enumerate(free) if i > 3 and token not in free[:i])
    for end_ids in ([later], [VOCAB_SIZE - 1, later]):
        edit(llama, "generation_config.json", eos_token_id=end_ids)
        output = LLM(llama, dtype="float32").generate(prompt, greedy)[0].outputs[0]
        assert output.finish_reason == "stop"
        assert list(output.token_ids)[: free.index(later)] == free[: free.index(later)]
        assert len(output.token_ids) <= free.index(later) + 1


# What is refused: checkpoints


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path / "nothing", "./nothing-here"):
        assert "no such directory" in refusal(str(name))


def test_a_directory_without_a_configuration_is_refused(llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "config.json" in refusal(llama)


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "no weights in this directory" in refusal(llama)


@pytest.mark.parametrize("size", [4, 100, 60_000])
def test_a_truncated_file_is_refused(size: int, llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert "cannot be loaded" in refusal(llama)


def test_a_checkpoint_without_one_of_its_tensors_is_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    message = refusal(llama)
    assert "lacks 1 of the model's weights" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_a_tensor_of_another_shape_is_refused(llama: Path) -> None:
    edit(llama, "config.json", intermediate_size=64)
    message = refusal(llama)
    assert "do not have the shapes" in message
    assert "[64, 96] in the file but [64, 64] in the model" in message


def test_a_model_bigger_than_memory_is_refused_before_it_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (llama / "model.safetensors").stat().st_size
    monkeypatch.setattr(memory, "available_memory", lambda device: size * 3 // 4)
    message = refusal(llama)
    assert "GiB of memory are free" in message
    assert load_model(llama, LoadOptions(dtype="bfloat16", device="cpu")).hf.dtype == torch.bfloat16  # half the bytes
    monkeypatch.setattr(memory, "available_memory", lambda device: None)
    load_model(llama, CPU)


# What is refused: kinds of models

_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
_GPT: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
_T5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
_ROTARY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_key_value_heads": 2}

REFUSED: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "encoder": ("BertConfig", _TINY, AutoModelForMaskedLM, "an encoder"),
    "encoder without a causal class": (
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
        AutoModelForMaskedLM,
        "cannot be loaded",
    ),
    "encoder-decoder": ("LongT5Config", _T5, AutoModelForSeq2SeqLM, "an encoder-decoder (longt5) that"),
    "mamba": (
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        AutoModelForCausalLM,
        "a recurrent state",
    ),
    "recurrent gemma": ("RecurrentGemmaConfig", {**_TINY, "lru_width": 32}, AutoModelForCausalLM, "a recurrent state"),
    "linear attention": ("Qwen3NextConfig", {**_TINY, **_LINEAR}, AutoModelForCausalLM, "a recurrent state"),
    "hybrid": ("JambaConfig", {**_TINY, **_MAMBA}, AutoModelForCausalLM, "a recurrent state"),
    "hybrid in every layer": (
        "FalconH1Config",
        {
            **_TINY,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
        },
        AutoModelForCausalLM,
        "FalconH1ForCausalLM keeps a recurrent state",
    ),
    "rwkv": (
        "RwkvConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
        AutoModelForCausalLM,
        "a recurrent state",
    ),
    "alibi": (
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2},
        AutoModelForCausalLM,
        "AttentionInterface",
    ),
    "attention of its own": ("GPTJConfig", {**_GPT, "rotary_dim": 8}, AutoModelForCausalLM, "AttentionInterface"),
    "attention of its own, rotary": ("FalconConfig", _ROTARY, AutoModelForCausalLM, "AttentionInterface"),
    "permutation": (
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
        AutoModelForCausalLM,
        "AttentionInterface",
    ),
    "positions of its own": (
        "BartConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 48,
            "encoder_layers": 1,
        },
        AutoModelForCausalLM,
        "its logits change when sequences share a pass",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_unsupported_model_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    config_class, settings, auto_class, reason = REFUSED[kind]
    torch.manual_seed(0)
    model = auto_class.from_config(getattr(transformers, config_class)(**settings))
    model.save_pretrained(tmp_path)
    assert reason in refusal(tmp_path)
    if auto_class is AutoModelForCausalLM:
        before = model.config._attn_implementation
        assert reason in refusal(model)
        assert model.config._attn_implementation == before


# Rotary embeddings that change with the longest position of a pass

ROPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dynamic": ("llama", 48, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
    "longrope": (
        "phi3",
        40,
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "original_max_position_embeddings": 40,
        },
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_the_context_ends_where_a_rotary_embedding_would_change(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, limit, rope = ROPES[kind]
    longest = limit if kind == "dynamic" else CONTEXT
    changes = {"rope_parameters": rope, "max_position_embeddings": longest, "original_max_position_embeddings": limit}
    config = replace(SPECIES[name], settings={**SPECIES[name].settings, **changes}).config()
    with caplog.at_level(logging.WARNING, "foredraft"):
        model = load_model(saved(config, tmp_path), FLOAT32)
    assert model.traits.context_len == limit
    assert f"({kind}) changes after {limit} positions" in caplog.text

    tokens = torch.randint(2, VOCAB_SIZE, (2, 2 * limit), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model.hf(tokens)  # its user reads further, and the embedding grows
        expected = model.hf(tokens[:, : limit - 1]).logits
    ours = read_in_chunks(model, tokens[:, : limit - 1].tolist(), sizes())
    for row in range(2):
        assert float((ours[row] - expected[row]).abs().max()) <= 1e-4
    with pytest.raises(ForedraftError, match=f"the context holds {limit}"):
        LLM(model.hf).generate(tokens[0].tolist(), SamplingParams(max_tokens=1))


# The model is not changed


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_model_in_memory_still_works_for_its_user(name: str) -> None:
    hf = random_model(SPECIES[name].config())
    before = (hf.config._attn_implementation, hf.config._experts_implementation)
    prompt = torch.tensor([[5, 9, 14, 3]])
    own = hf.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    LLM(hf, hf).generate(prompt[0].tolist(), SamplingParams(temperature=0.0, max_tokens=12))
    assert (hf.config._attn_implementation, hf.config._experts_implementation) == before
    assert torch.equal(hf.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0), own)


def test_the_attention_of_every_part_is_restored_after_a_failure() -> None:
    config = transformers.Gemma3Config()
    config._attn_implementation = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(SPECIES["llama"].config())
    whole.config = config

    def fail() -> None:
        with routed(whole):
            assert config.text_config._attn_implementation == "foredraft"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert config._attn_implementation == "sdpa"
    assert config.text_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "sdpa"


def test_available_memory_is_a_plausible_number() -> None:
    free = memory.available_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


def test_reading_past_what_was_reserved_is_an_error(checkpoint: Maker) -> None:
    model: LanguageModel = load_model(checkpoint("llama"), FLOAT32)
    with pytest.raises(RuntimeError, match="no room is reserved"):
        model.read([Read(0, [1, 2, 3], 1)], model.new_cache(MemoryPool(1 << 20)))
