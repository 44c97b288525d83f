"""Two models can be combined if their ids mean the same tokens; the widths of their logits may differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from foredraft.errors import VocabularyError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.vocabulary import check_vocabulary
from tests.model.zoo import SPECIES, VOCAB_SIZE, random_model
from tests.text.toy_tokenizers import MODELS

WORDS = [f"w{i}" for i in range(VOCAB_SIZE)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def words_tokenizer(words: list[str], eos: str = "w1", order: int = 1) -> PreTrainedTokenizerFast:
    """A tokenizer of words. order: -1 lists the words in reverse, with the same ids."""
    model = WordLevel(dict([(word, i) for i, word in enumerate(words)][::order]), unk_token=words[0])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token=words[0], eos_token=eos, bos_token=words[2]
    )


def with_tokenizer(directory: Path, width: int, words: list[str], seed: int) -> Path:
    """A checkpoint whose logits are `width` wide. Ids past the words are padding that it never writes."""
    species = SPECIES["llama"]
    model = random_model(replace(species, settings={"vocab_size": width}).config(), seed)
    model.get_output_embeddings().weight.data[len(words) :] = 0
    model.save_pretrained(directory)
    words_tokenizer(words).save_pretrained(directory)
    return directory


def test_the_same_ids_are_the_same_vocabulary() -> None:
    """In any order in the file, and with any special tokens. With one more token it is another vocabulary."""
    target = words_tokenizer(WORDS)
    for draft in (words_tokenizer(WORDS, order=-1), words_tokenizer(WORDS, eos="w5")):
        check_vocabulary(target, draft)
        draft.add_tokens(["one more"])
        with pytest.raises(
            VocabularyError, match="97 tokens instead of 96; token 96 is 'one more' in the draft but None"
        ):
            check_vocabulary(target, draft)


def test_differences_are_named() -> None:
    other = [*WORDS[:7], "seven", *WORDS[8:90]]
    with pytest.raises(VocabularyError) as caught:
        check_vocabulary(words_tokenizer(WORDS), words_tokenizer(other, eos="w5"))
    message = str(caught.value)
    assert "\n" not in message
    assert "90 tokens instead of 96" in message
    assert "token 7 is 'seven' in the draft but 'w7' in the target" in message
    assert "eos_token_id is 5 instead of 1" in message


@pytest.mark.parametrize(("target_width", "draft_width"), [(VOCAB_SIZE, 128), (128, VOCAB_SIZE), (112, 128)])
def test_a_padded_logit_width_is_not_a_difference(target_width: int, draft_width: int, tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", target_width, WORDS, seed=0)
    draft = with_tokenizer(tmp_path / "draft", draft_width, WORDS, seed=1)
    prompts = ["w5 w9 w14", "w3"]
    plain = LLM(target, method="none", dtype="float32").generate(prompts, GREEDY)
    llm = LLM(target, draft, dtype="float32", speculative_tokens=3)
    for ours, expected in zip(llm.generate(prompts, GREEDY), plain, strict=True):
        assert ours.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.engine.stats.num_draft_tokens > 0
    llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=24))


def test_a_draft_of_another_vocabulary_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", VOCAB_SIZE, WORDS, seed=0)
    draft = with_tokenizer(tmp_path / "draft", VOCAB_SIZE, WORDS[::-1], seed=1)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])  # what reads them fails
    with pytest.raises(VocabularyError, match="token 0 is 'w95' in the draft but 'w0' in the target"):
        LLM(target, draft, dtype="float32", heterogeneous_vocab="none")


def test_a_real_pair_of_different_tokenizers_is_refused() -> None:
    if not MODELS.is_dir():
        pytest.skip("needs ../shared/models")
    with pytest.raises(VocabularyError, match="105 tokens instead of 512"):
        LLM(MODELS / "stories260K", MODELS / "babyllama105", heterogeneous_vocab="none")


def test_toy_logits_have_the_given_width(tmp_path: Path) -> None:
    llm = LLM(with_tokenizer(tmp_path, 128, WORDS, seed=0), method="none", dtype=torch.float32)
    assert llm.target.traits.vocab_size == 128
