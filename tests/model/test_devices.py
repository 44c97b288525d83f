"""Models with a device map. With only one device, what several would need is tested in parts: hooks that move a layer's inputs, masks
and memory by device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from foredraft import LLM
from foredraft.errors import ForedraftError, ModelError
from foredraft.kernels import load_kernels
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, auto_class, load_model, memory
from foredraft.model.attention import AttentionMetadata, Chain
from foredraft.model.stack import StackBody
from tests.command_line import assert_refused, generate
from tests.model.zoo import Maker

PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def logits_of(model: LanguageModel) -> torch.Tensor:
    return model.read([Read(0, [5, 6, 7, 8], 4), Read(1, [9, 10], 1)], model.scratch_cache([4, 2]))


def in_memory(directory: Path, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **settings)


@pytest.mark.parametrize("device_map", ["auto", "balanced", PLACES, {"": "cpu"}], ids=str)
def test_a_device_map_loads_the_same_model(checkpoint: Maker, device_map: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, given = checkpoint("llama"), []
    original = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs.get("device_map"))
        return original(*args, **kwargs)

    monkeypatch.setattr(auto_class.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    placed = load_model(directory, LoadOptions(dtype="float32", device_map=device_map))
    assert torch.equal(logits_of(placed), logits_of(load_model(directory, LoadOptions("float32", "cpu"))))
    assert given == [device_map, None]


def test_on_one_device_the_kernels_are_used() -> None:
    llm = LLM(EMBEDDED / "target", method="suffix", device_map="auto", num_threads=1)
    assert isinstance(llm.target.body, StackBody) == (load_kernels() is not None)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_a_model_dispatched_by_accelerate_works(checkpoint: Maker, name: str) -> None:
    """Its hooks see our batch, cache and masks among each layer's inputs, and pass them on unchanged."""
    directory = checkpoint(name)
    hf = in_memory(directory)
    whole = load_model(in_memory(directory), LoadOptions())
    parts = {key.rpartition(".")[0]: "cpu" for key, _ in hf.named_parameters() if "." in key}
    dispatched = dispatch_model(hf, parts, main_device="cpu", force_hooks=True)
    assert hasattr(
        dispatched.model.layers[0].self_attn.q_proj if name != "deepseek_v3" else dispatched.lm_head, "_hf_hook"
    )
    assert torch.equal(logits_of(load_model(dispatched, LoadOptions())), logits_of(whole))


def test_taps_of_a_dispatched_model_are_on_the_device_of_its_logits(checkpoint: Maker) -> None:
    directory = checkpoint("llama")
    dispatched = dispatch_model(
        in_memory(directory), {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True
    )
    whole = load_model(in_memory(directory), LoadOptions())
    taps, text = (0, 1, 2, -1), [[5, 6, 7]]
    (features,), (expected,) = (
        model.read_features(text, taps) for model in (load_model(dispatched, LoadOptions()), whole)
    )
    assert torch.equal(features, expected)


def test_each_device_has_its_own_masks() -> None:
    metadata, mask = AttentionMetadata([]), {}
    chain = Chain(slice(0, 2), 3, torch.zeros(1, 16, 4), torch.zeros(1, 16, 4))
    for device in ("cpu", "meta", "cpu"):
        mask[device] = metadata.mask(causal_mask_function, chain, 2, 1, torch.zeros(1, device=device))
        assert mask[device].device.type == device


def test_cache_memory_is_limited_by_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    free = {first: 3000, second: 10_000}
    monkeypatch.setattr(memory, "layers_by_device", lambda hf: Counter({first: 3, second: 5}))
    monkeypatch.setattr(memory, "available_memory", free.get)
    monkeypatch.setattr(memory, "num_sharing_memory", lambda hf: 1)
    assert memory.memory_for_layers(None) == 8000  # type: ignore[arg-type]
    free.pop(second)
    assert memory.memory_for_layers(None) is None  # type: ignore[arg-type]


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device_map": "everywhere"}, "device_map must be one of auto, balanced"),
        ({"device_map": {0: "cpu"}}, "a mapping from modules to devices"),
        ({"device_map": {"model": "disk"}}, "leaves model on disk"),
        ({"device_map": {"": "meta"}}, "leaves the model on meta"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "leaves lm_head on cpu"),
        ({"device_map": "auto", "device": "cpu"}, "device_map and device both say where the weights are placed"),
        ({"device_map": "auto", "tp_plan": "auto"}, "device_map and tp_plan both say where the weights are placed"),
    ],
    ids=str,
)
def test_unusable_device_maps_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ForedraftError, match=words) as caught:
        LLM(EMBEDDED / "target", method="none", **settings)
    assert "\n" not in str(caught.value)


def test_a_model_in_memory_that_is_partly_on_disk_is_refused(checkpoint: Maker) -> None:
    hf = in_memory(checkpoint("llama"))
    hf.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ModelError, match="leaves lm_head on disk"):
        load_model(hf, LoadOptions())


def test_early_exits_of_a_model_on_several_devices_are_refused(checkpoint: Maker) -> None:
    hf = in_memory(checkpoint("llama"))
    hf.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ModelError, match="is split over several devices, but heads and early exits"):
        LLM(hf, exit_layer=1)


def test_a_gguf_file_with_a_device_map_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="GGUF"):
        load_model(file, LoadOptions(device_map="auto"))


def test_without_accelerate_the_error_says_what_to_install(checkpoint: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'foredraft\[accelerate\]'"):
        load_model(checkpoint("llama"), LoadOptions(device_map="auto"))


def test_the_command_line_takes_device_maps(checkpoint: Maker) -> None:
    target = str(checkpoint("llama"))
    assert_refused(generate("--model", target, "--device-map", '{"model": "disk"}', "hello"), "disk")
    assert_refused(generate("--model", target, "--device-map", "nowhere", "hello"), "device_map", "nowhere")
    result = generate("--device-map", "auto", "--max-tokens", "2", "--method", "suffix", "hello")
    assert result.exit_code == 0, result.stderr
