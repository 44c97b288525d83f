"""Every supported architecture, compared with transformers' own forward pass and `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.engine.memory_pool import MemoryPool
from foredraft.llm import LLM
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.sampling import SamplingParams
from tests.methods import all_methods
from tests.model.reference import assert_same_as_reference, greedy
from tests.model.zoo import SPECIES, VOCAB_SIZE, WINDOW, Maker

NUM_TOKENS = 28
PROMPT_LENS = (3, 2 * WINDOW + 5, WINDOW - 2)
METHODS = ("none", "ngram", "suffix", "draft_model")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")


def random_prompts(vocab_size: int = VOCAB_SIZE, lens: Sequence[int] = PROMPT_LENS) -> list[list[int]]:
    """Random prompts. The second one contains repeats, so that n-gram drafts occur from the start."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lens]
    prompts[1][-8:] = prompts[1][:8]
    return prompts


PROMPTS = random_prompts()


@cache
def loaded(directory: Path, dtype: str = "float32") -> LanguageModel:
    return load_model(directory, LoadOptions(dtype=dtype, device="cpu"))


@cache
def reference(directory: Path) -> list[list[int]]:
    return greedy(loaded(directory).hf, PROMPTS, NUM_TOKENS)


def write(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS, **params: Any) -> list[list[int]]:
    greedily = SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **params})
    return [list(output.outputs[0].token_ids) for output in llm.generate([list(p) for p in prompts], greedily)]


def read_in_chunks(model: LanguageModel, sequences: Sequence[Sequence[int]], sizes: Iterator[int]) -> list[Tensor]:
    """Every sequence's logits. The sequences share passes, and each advances by its own number of tokens in each pass."""
    cache = model.new_cache(MemoryPool(1 << 30))
    parts: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for seq_id, tokens in enumerate(sequences):
        assert cache.reserve(seq_id, len(tokens))
    while any(n < len(tokens) for n, tokens in zip(done, sequences, strict=True)):
        reads = []
        for seq_id, tokens in enumerate(sequences):
            chunk = tokens[done[seq_id] : done[seq_id] + next(sizes)]
            if chunk:
                reads.append(Read(seq_id, chunk, len(chunk)))
        logits = torch.split(model.read(reads, cache), [read.num_logits for read in reads])
        for read, part in zip(reads, logits, strict=True):
            parts[read.seq_id].append(part)
            done[read.seq_id] += read.num_logits
    return [torch.cat(part) for part in parts]


def sizes() -> Iterator[int]:
    while True:
        yield from (7, 1, 5, 2, 11, 3, 1)


@pytest.mark.parametrize("name", SPECIES)
def test_logits_of_a_ragged_batch_in_chunks_are_those_of_transformers(name: str, checkpoint: Maker) -> None:
    model = loaded(checkpoint(name))
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3 * WINDOW + 4, 20, 5, 1)]
    for ours, tokens in zip(read_in_chunks(model, sequences, sizes()), sequences, strict=True):
        with torch.inference_mode():
            theirs = model.hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        assert float((ours - theirs).abs().max()) <= 1e-4


@pytest.mark.parametrize("method", all_methods(METHODS))
@pytest.mark.parametrize("name", SPECIES)
def test_greedy_text_is_that_of_generate(name: str, method: str, checkpoint: Maker) -> None:
    """In a batch, with chunked prefill, past every sliding window."""
    directory = checkpoint(name)
    # the checkpoint was loaded from its directory once; here loaded models are passed
    draft = loaded(checkpoint("llama", 1)).hf if method == "draft_model" else None
    llm = LLM(loaded(directory).hf, draft, method=method, max_num_batched_tokens=16)
    assert_same_as_reference(llm.target.hf, PROMPTS, write(llm, PROMPTS), reference(directory))


@pytest.mark.parametrize("name", SPECIES)
def test_drafts_of_the_target_itself_are_always_right(name: str, checkpoint: Maker) -> None:
    directory = checkpoint(name)
    model = loaded(directory).hf
    llm = LLM(directory, model, dtype="float32", speculative_tokens=3)
    assert_same_as_reference(model, PROMPTS, write(llm, PROMPTS), reference(directory))
    stats = llm.engine.stats
    assert stats.num_draft_tokens > 3 * NUM_TOKENS // 2
    assert stats.conditional_acceptance is not None
    assert stats.conditional_acceptance >= 0.97


@pytest.mark.parametrize("name", SPECIES)
def test_every_architecture_can_draft(name: str, checkpoint: Maker) -> None:
    """For a Llama, whose text it must not change."""
    target = checkpoint("llama")
    llm = LLM(loaded(target).hf, loaded(checkpoint(name, 2)).hf, speculative_tokens=3)
    assert_same_as_reference(llm.target.hf, PROMPTS, write(llm, PROMPTS), reference(target))
    assert llm.engine.stats.num_draft_tokens > 0


def test_greedy_text_of_a_real_checkpoint(stories260k: Path) -> None:
    llm = LLM(stories260k, dtype="float32")
    assert llm.tokenizer is not None
    texts = ("Once upon a time", "Lily and Tom went to the park. They saw a", "The dog")
    prompts = [llm.tokenizer(text)["input_ids"] for text in texts]
    library = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32).eval()
    expected = greedy(library, prompts, 60)
    for method in METHODS:
        draft = stories260k if method == "draft_model" else None
        other = LLM(stories260k, draft, method=method, dtype="float32")
        assert_same_as_reference(library, prompts, write(other, prompts, 60), expected)


@pytest.mark.parametrize("name", [*SPECIES])
def test_rows_are_exact_in_bfloat16(name: str, checkpoint: Maker) -> None:
    """On a CPU with bfloat16 products. With routers that multiply in float32 rows are not promised to be exact."""
    assert loaded(checkpoint(name), "bfloat16").traits.row_exact == (name != "deepseek_v3")
    assert not loaded(checkpoint(name)).traits.row_exact


def test_rows_of_a_real_checkpoint_are_exact_in_bfloat16(stories260k: Path) -> None:
    assert loaded(stories260k, "bfloat16").traits.row_exact


@pytest.mark.parametrize("name", ["llama", "gemma2", "starcoder2", "deepseek_v3", *MIXTURES])
def test_speculation_changes_no_token_in_bfloat16(name: str, checkpoint: Maker) -> None:
    """Greedy, and for two models seeded, compared with plain decoding alone and in other chunks."""
    model, draft = checkpoint(name), checkpoint("llama", 1)
    plain = LLM(model, method="none", dtype="bfloat16", max_num_batched_tokens=9, enable_prefix_caching=False)
    others = (
        LLM(model, draft, dtype="bfloat16", speculative_tokens=5),
        LLM(model, model, dtype="bfloat16"),
        LLM(model, method="suffix", dtype="bfloat16"),
    )
    seeded = [{"temperature": 0.7, "seed": 3}] if name in ("llama", "qwen3_moe") else []
    for params in ({}, *seeded):
        expected = [write(plain, [prompt], 40, **params)[0] for prompt in PROMPTS]
        for other in others:
            assert write(other, PROMPTS, 40, **params) == expected
