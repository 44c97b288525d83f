"""Induction heads: a head that copies before it has been trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft import LLM, ForedraftError, SamplingParams
from foredraft.heads import EagleHead, TargetShape, load_head
from foredraft.heads.saving import save_eagle3
from foredraft.heads.unrolled import unroll
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model
from foredraft.train.head_student import new_eagle3
from foredraft.train.induction import with_induction_heads

TARGET = EMBEDDED / "target"
TAPS = (1, 4, 7)
LENGTH = 128


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    loaded = load_model(str(TARGET), LoadOptions(device="cpu"))
    loaded.take_over()
    return loaded


def random_texts(number: int, length: int, seed: int) -> Tensor:
    return torch.randint(5, 4096, (number, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def heads(target: LanguageModel) -> tuple[EagleHead, EagleHead]:
    """A head with random weights, and the same with induction heads."""
    head = new_eagle3(target, TAPS, None, seed=0).requires_grad_(True)
    return head, with_induction_heads(head, target, random_texts(100, LENGTH, seed=1))


def logits_of(head: EagleHead, target: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Of the first, second and third draft token after every position. Row P of step j is for the token at P + 2 + j."""
    features = torch.stack(target.read_features(ids.tolist(), head.config.taps)).float()
    return list(unroll(head, features[:, :-1], ids[:, 1:], 3))


@torch.no_grad()
def test_a_repetition_is_continued_at_every_depth_of_a_draft(
    heads: tuple[EagleHead, EagleHead], target: LanguageModel
) -> None:
    """Texts repeat their first half. There the logit of the token that continues the repetition rises above all others, and in the first
    half, where nothing is repeated, it does not."""
    half = random_texts(4, LENGTH // 2, seed=2)
    ids = torch.cat([half, half], dim=1)
    before, after = (logits_of(head, target, ids) for head in heads)
    for step, (old, new) in enumerate(zip(before, after, strict=True)):
        rise = new - old
        next_ids = ids[:, 2 + step :, None]
        rise = rise[:, : next_ids.shape[1]]
        of_next = rise.gather(2, next_ids)[..., 0] - rise.mean(2)
        assert of_next[:, LENGTH // 2 :].mean() > 1
        assert of_next[:, : LENGTH // 2 - 2 - step].mean().abs() < 0.2


@torch.no_grad()
def test_other_attention_heads_are_kept(heads: tuple[EagleHead, EagleHead]) -> None:
    old, new = (head.state_dict() for head in heads)
    assert old.keys() == new.keys()
    for name, weight in old.items():
        if name != "fc.weight":
            kept = tuple(slice(size) for size in weight.shape)
            assert torch.equal(new[name][kept], weight)


def test_its_texts_are_the_target_s_own(
    heads: tuple[EagleHead, EagleHead], target: LanguageModel, tmp_path: Path
) -> None:
    """In the compiled kernels, in which attention is now wider than the states."""
    save_eagle3(heads[1], tmp_path, "target", ["LlamaForCausalLM"], without=["lm_head.weight"])
    config = load_head(str(tmp_path), TargetShape.of(target.hf.config)).config
    assert config.layer.num_attention_heads == 8
    assert config.layer.num_key_value_heads == 8
    prompts, params = ["one two three, one two", "def add(a, b):"], SamplingParams(max_tokens=24, temperature=0.0)
    plain = LLM(str(TARGET)).generate(prompts, params)
    drafted = LLM(str(TARGET), str(tmp_path), speculative_tokens=4).generate(prompts, params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]


def test_heads_of_another_form_are_refused(heads: tuple[EagleHead, EagleHead], target: LanguageModel) -> None:
    head, ids = heads[0], random_texts(2, 16, seed=3)
    for form in ({"fc_norm": True}, {"kind": "eagle1"}, {"mask_token": 3}):
        other = head.of_form(replace(head.config, **form))  # type: ignore[arg-type]
        with pytest.raises(ForedraftError, match="induction heads"):
            with_induction_heads(other, target, ids)


def test_blocks_too_long_for_its_rotary_angles_are_refused(
    heads: tuple[EagleHead, EagleHead], target: LanguageModel
) -> None:
    with pytest.raises(ForedraftError, match="give shorter blocks"):
        with_induction_heads(heads[0], target, torch.zeros(0, 100_000, dtype=torch.int64))


def test_a_number_of_attention_heads_that_configurations_cannot_hold_is_refused(
    heads: tuple[EagleHead, EagleHead], target: LanguageModel
) -> None:
    with pytest.raises(ForedraftError, match="cannot have 5 attention heads"):
        with_induction_heads(heads[0], target, random_texts(2, 16, seed=3), num_groups=1)
