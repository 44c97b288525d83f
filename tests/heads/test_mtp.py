"""MTP layers compared with transformers' own, and MiMo's with its description; and what a checkpoint must contain."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from foredraft import LLM, SamplingParams
from foredraft.drafters import DrafterContext, build
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, DraftRequest, Features
from foredraft.errors import ForedraftError, ModelError
from foredraft.heads import HeadOptions, MtpHead, attach_mtp
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.testing.requests import request_for
from tests.heads import mtp_targets
from tests.heads.mtp_targets import VOCAB_SIZE, glm, mimo, mimo_tensors, new_mtp, new_target, save, saved, stored
from tests.heads.running import cache_for

PROMPT = [5, 17, 3, 60, 41, 8, 8, 29]
TOLERANCE = 1e-4
MAKERS = {"glm": mtp_targets.glm, "deepseek": mtp_targets.deepseek}


def loaded(folder: Path) -> LanguageModel:
    return load_model(folder, LoadOptions(device="cpu", dtype="float32"))


def request(target: LanguageModel, tokens: Sequence[int], max_len: int, num_forced: int = 0) -> DraftRequest:
    """A request as the engine makes it after the target has read everything but the pending and the forced tokens."""
    (features,) = target.read_features([tokens[: len(tokens) - 1 - num_forced]], (-1,))
    sampler = request_for(0, tokens, max_len).sampler
    return DraftRequest(0, tokens, max_len, sampler, Features(features), num_forced)


def drafter_of(head: MtpHead, max_rows: int = 512) -> Any:
    return build("mtp", DrafterContext(VOCAB_SIZE, MemoryPool(1 << 26), None, max_rows, head, 256))


@torch.inference_mode()
def by_transformers(hf: PreTrainedModel, mtp: MtpModel, ids: Sequence[int]) -> tuple[list[int], Tensor, Tensor]:
    """What transformers drafts after these tokens, of which the target has read all but the last: a token for each layer, its logits
    [n, V], and the first layer's states [len(ids) - 1, H]."""
    hidden = hf(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1]
    inputs = {
        "input_ids": torch.tensor([ids[1:]]),
        "last_hidden_states": hidden,
        "position_ids": torch.arange(1, len(ids))[None],
    }
    drafted, logits, _ = mtp(**inputs, attention_mask=None, mtp_cache=MtpCache(config=hf.config.get_mtp_config()))
    ids_of_rows, positions = inputs["input_ids"], inputs["position_ids"]
    cache = MtpCache(config=hf.config.get_mtp_config())
    states = mtp.forward_layer(0, hidden, positions, cache, input_ids=ids_of_rows)
    return drafted[0].tolist(), logits[0], states[0]


@pytest.mark.parametrize("family", MAKERS)
def test_one_layer_computes_what_transformers_does(family: str) -> None:
    """Its states and logits over a history, read at once and in chunks, and those of the next two steps, in which transformers' layer
    runs again on its own output."""
    hf = new_target(MAKERS[family]())
    mtp, target = new_mtp(hf), loaded(saved(family))
    head = attach_mtp(str(saved(family)), target)
    (features,) = target.read_features([PROMPT[:-1]], head.config.taps)
    drafted, logits, states = by_transformers(hf, mtp, PROMPT)
    for chunks in ([7], [3, 1, 3]):
        cache, readings, start = cache_for(head, [16]), [], 0
        for size in chunks:
            rows = slice(start, start + size)
            readings.append(head.read([Read(0, PROMPT[1:][rows], size)], features[rows], cache))
            start += size
        assert (torch.cat([reading.states for reading in readings]) - states).abs().max() < TOLERANCE
        assert (readings[-1].logits[-1:] - logits).abs().max() < TOLERANCE
    theirs = MtpCache(config=hf.config.get_mtp_config())
    with torch.inference_mode():
        state = mtp.forward_layer(
            0,
            hf(torch.tensor([PROMPT[:-1]]), output_hidden_states=True).hidden_states[-1],
            torch.arange(1, 8)[None],
            theirs,
            input_ids=torch.tensor([PROMPT[1:]]),
        )[:, -1:]
        reading, expected = readings[-1], [int(readings[-1].logits[-1].argmax())]
        assert expected == drafted
        for position in (8, 9):
            token = torch.tensor([[expected[-1]]])
            state = mtp.forward_layer(0, state, torch.tensor([[position]]), theirs, input_ids=token)
            reading = head.read([Read(0, [expected[-1]], 1)], reading.states[-1:], cache)
            assert (reading.states - state[0]).abs().max() < TOLERANCE
            assert (reading.logits - mtp.shared_head(state)[0]).abs().max() < TOLERANCE
            expected.append(int(mtp.shared_head(state).argmax()))
    proposal = drafter_of(head).propose([request(target, PROMPT, 3)])
    assert proposal.draft_ids == [expected]
    assert proposal.draft_prob_rows == [[CERTAIN] * 3]


@pytest.mark.parametrize(("family", "max_rows"), [("glm", 512), ("deepseek", 4)])
def test_several_layers_draft_what_transformers_drafts(family: str, max_rows: int) -> None:
    """Three layers, after accepted and rejected drafts, with the keys and values of the previous steps."""
    hf = new_target(MAKERS[family](3))
    mtp, target = new_mtp(hf), loaded(saved(family, 3))
    head = attach_mtp(str(saved(family, 3)), target)
    assert head.bytes_per_token == 3 * attach_mtp(str(saved(family)), loaded(saved(family))).bytes_per_token
    drafter, tokens = drafter_of(head, max_rows), list(PROMPT)
    for num_taken, own in ((3, [1]), (0, [9]), (1, [30]), (2, [7]), (0, [2, 40, 11])):
        expected, logits, _ = by_transformers(hf, mtp, tokens)
        assert drafter.propose([request(target, tokens, 3)]).draft_ids == [expected]
        assert drafter.propose([request(target, tokens, 5)]).draft_ids == [expected], "no more than its layers"
        assert drafter.propose([request(target, tokens, 2)]).draft_ids == [expected[:2]]
        assert logits.shape == (3, VOCAB_SIZE)
        tokens = [*tokens, *expected[:num_taken], *own]
    forced = request(target, tokens, 3, num_forced=1)
    alone = drafter_of(head).propose([forced]).draft_ids
    assert drafter.propose([forced]).draft_ids == alone
    assert len(alone[0]) == 2, "the first layer's place is forced"
    drafter.forget([0])
    assert drafter.bytes_held == 0


@torch.inference_mode()
def test_mimo_computes_what_its_description_says() -> None:
    """transformers has no MiMo. Its projection reads the hidden state first. One layer, over whole histories and in our own steps."""
    hf = new_target(mimo())
    weights, target = mimo_tensors(hf), loaded(saved("mimo"))
    head = attach_mtp(str(saved("mimo")), target)
    (features,) = target.read_features([PROMPT[:-1]], head.config.taps)
    weights = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in weights.items()}

    def normalized(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + hf.config.rms_norm_eps) * weights[f"{name}.weight"]

    layer: Any = type(hf.model.layers[0])(hf.config, 0)
    layer.load_state_dict({name: tensor for name, tensor in weights.items() if name in layer.state_dict()})
    embeds = hf.model.embed_tokens(torch.tensor(PROMPT[1:]))
    joined = torch.cat((normalized(features, "hidden_layernorm"), normalized(embeds, "token_layernorm")), dim=-1)
    x = joined @ weights["input_proj.weight"].T
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    angles = hf.model.rotary_emb(x[None], torch.arange(7)[None])
    out = layer(x[None], attention_mask=mask, position_embeddings=angles)
    states = normalized((out if isinstance(out, Tensor) else out[0])[0], "final_layernorm")
    reading = head.read([Read(0, PROMPT[1:], 7)], features, cache_for(head, [7]))
    assert (reading.states - states).abs().max() < TOLERANCE
    assert (reading.logits - hf.lm_head(states)).abs().max() < TOLERANCE


_REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class MiMoConfig(Qwen2Config):
    model_type = "mimo"

class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
"""


def mimo_with_code(folder: Path) -> Path:
    """A checkpoint as MiMo is published, with its architecture as code beside the weights."""
    folder = Path(shutil.copytree(saved("mimo"), folder / "mimo"))
    (folder / "modeling_mimo.py").write_text(_REMOTE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    classes = {"AutoConfig": "MiMoConfig", "AutoModelForCausalLM": "MiMoForCausalLM"}
    config["auto_map"] = {auto: f"modeling_mimo.{own}" for auto, own in classes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("family", "num_layers"), [("glm", 3), ("deepseek", 1), ("mimo", 1)])
def test_texts_are_plain_decodings(family: str, num_layers: int, tmp_path: Path) -> None:
    """In float32, through the public API, with random layers."""
    has_code = family == "mimo"
    folder = mimo_with_code(tmp_path) if has_code else saved(family, num_layers)
    llm = LLM(folder, method="mtp", dtype="float32", speculative_tokens=3, trust_remote_code=has_code, num_threads=1)
    plain = llm.with_drafter("none")
    for params in (SamplingParams(max_tokens=12, temperature=0), SamplingParams(max_tokens=12, seed=3)):
        prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert llm.engine.stats.num_draft_tokens > 20


def test_a_window_hides_earlier_tokens() -> None:
    target = loaded(saved("glm"))
    whole, capped = (attach_mtp(str(saved("glm")), target, options=HeadOptions(window)) for window in (0, 3))
    (features,) = target.read_features([PROMPT[:-1]], (-1,))
    first, second = (
        head.read([Read(0, PROMPT[1:], 7)], features, cache_for(head, [7])).states for head in (whole, capped)
    )
    assert torch.equal(first[:3], second[:3])
    assert not torch.allclose(first[3:], second[3:])


def spoiled(tmp_path: Path, **tensors: Tensor | None) -> Path:
    """A GLM target with some of its MTP layer's tensors changed; "__" in a name means "."."""
    target = new_target(glm())
    folder = save(target, stored(new_mtp(target)), tmp_path / "target")
    return mtp_targets.add(folder, {name.replace("__", "."): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__layers__2__eh_proj__weight": None}, r"tensors are missing: layers\.0\.eh_proj\.weight"),
        ({"model__layers__2__extra__weight": torch.ones(2)}, r"does not use: layers\.0\.block\.extra\.weight"),
        (
            {"model__layers__2__enorm__weight": torch.ones(5)},
            r"layers\.0\.enorm\.weight has the shape \[5\] in the file",
        ),
        (
            {"model__layers__2__eh_proj__weight": torch.ones(32, 64).to(torch.float8_e4m3fn)},
            "only unquantized weights are supported",
        ),
        ({"model__layers__2__mlp__experts__1__up_proj__weight": None}, r"lack expert weights: 1\.up_proj"),
        ({"model__layers__4__enorm__weight": torch.ones(32)}, r"should be 2, 3, \.\.\., but are 2, 4"),
        (
            {"model__layers__2__embed_tokens__weight": torch.ones(64, 32)},
            r"embed_tokens\.weight of its MTP layers differs from the target's",
        ),
    ],
    ids=["missing", "unused", "shape", "quantized", "expert", "gap", "copy"],
)
def test_unsuitable_tensors_are_refused_by_name(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    folder = spoiled(tmp_path, **tensors)
    with pytest.raises(ModelError, match=message) as error:
        attach_mtp(str(folder), loaded(saved("glm")))
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", '{"weight_map": 3}', '{"weight_map": {"mtp.fc.weight": "gone.safetensors"}}'])
def test_an_index_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str) -> None:
    target = loaded(saved("glm"))
    folder = tmp_path / "spoiled"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="the head cannot be read") as error:
        attach_mtp(str(folder), target)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


def test_a_target_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    folder = save(new_target(glm()), {}, tmp_path / "plain")
    with pytest.raises(ModelError, match="it has no MTP layers"):
        LLM(folder, method="mtp")
    with pytest.raises(ModelError, match="no MTP layers"):
        LLM(folder, method="none").with_drafter("mtp")
    add = {"mtp.fc.weight": torch.ones(2, 2)}
    with pytest.raises(
        ModelError, match=r"an unknown format \(mtp\.fc\.weight; supported formats: DeepSeek-V3, MiMo\)"
    ):
        LLM(mtp_targets.add(folder, add), method="mtp")


def test_layers_of_several_kinds_are_refused(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    sizes = {key: value for key, value in mimo().to_dict().items() if key not in ("layer_types", "model_type")}
    config = Qwen2Config(**{**sizes, "layer_types": kinds, "use_sliding_window": True, "sliding_window": 8})
    target = new_target(config)
    folder = save(target, mimo_tensors(target), tmp_path)
    with pytest.raises(ModelError, match="its layer_types are full_attention, sliding_attention"):
        LLM(folder, method="mtp")


def test_incompatible_options_are_refused() -> None:
    folder = saved("glm")
    with pytest.raises(ForedraftError, match='"mtp" makes its draft from the target: leave draft_model out'):
        LLM(folder, draft_model=folder, method="mtp")
    with pytest.raises(ForedraftError, match='"mtp" cannot be combined with another head'):
        LLM(folder, draft_model=folder, method="mtp+eagle")
    with pytest.raises(ForedraftError, match="exit_layer is for the method"):
        LLM(folder, method="mtp", exit_layer=1)
    with pytest.raises(ForedraftError, match="give its directory or hub id, not a model object"):
        LLM(new_target(glm()), method="mtp")
    with pytest.raises(ForedraftError, match="MTP layers that LLM finds"):
        build("mtp", DrafterContext(VOCAB_SIZE, MemoryPool(1 << 20)))


def test_a_wrong_number_of_layers_in_the_configuration_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = new_target(glm(2))
    folder = save(
        target, {name: t for name, t in stored(new_mtp(target)).items() if ".layers.3." not in name}, tmp_path
    )
    with caplog.at_level(logging.INFO, "foredraft"):
        assert attach_mtp(str(folder), loaded(folder)).num_layers == 1
    assert "config.json specifies 2 MTP layers, but the weights have 1" in caplog.text
