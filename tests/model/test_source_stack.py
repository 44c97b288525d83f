"""An encoder-decoder as two compiled calls: it gives transformers' logits, and generates tokens in one call. test_encoder_decoder.py
tests its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.engine.cache import KVCache
from foredraft.engine.sources import TokenSource
from foredraft.kernels import DrawSpec, load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, Read
from foredraft.model.encoder_decoder import EncoderDecoderBody
from foredraft.model.generation import generate_step_by_step
from foredraft.model.prepare import prepare
from foredraft.model.source_probe import probe_encoder_decoder
from foredraft.model.source_stack import SourceStackBody, has_source_stack_form
from tests.model.zoo import ENCODER_DECODERS, VOCAB_SIZE, Species, random_model

pytestmark = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")

BF16 = LoadOptions(dtype="bfloat16", device="cpu")
BY_THE_LIBRARY = ("blenderbot_small", "t5gemma")
_T5, _BART = (ENCODER_DECODERS[name].base for name in ("t5", "bart"))

FORMS: dict[str, Species] = {
    **{name: species for name, species in ENCODER_DECODERS.items() if name not in BY_THE_LIBRARY},
    "t5, tied and with plain MLPs": Species("t5", {"tie_word_embeddings": True}, base=_T5),
    "t5 with a gated SiLU": Species("t5", {"feed_forward_proj": "gated-silu"}, base=_T5),
    "bart with ReLU": Species("bart", {"activation_function": "relu"}, base=_BART),
    "marian with Swish and scaled embeddings": Species(
        "marian", {"activation_function": "swish", "scale_embedding": True}, base=_BART
    ),
}
SOURCE_LENS, LENS = (11, 60, 1, 30), (10, 45, 18, 2)


def random_ids(lens: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lens]


def made(name: str) -> PreTrainedModel:
    """A random model with weights that bfloat16 can represent, and with a bias of the logits if the family has one."""
    hf = random_model(FORMS[name].config())
    if hasattr(hf, "final_logits_bias"):
        hf.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    return hf.bfloat16()


@cache
def loaded(name: str) -> LanguageModel:
    return probe_encoder_decoder(made(name), name, lambda ours: prepare(ours, name, BF16))


@torch.inference_mode()
def reference(name: str, source: Sequence[int], text: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' logits."""
    ids, decoder_ids = torch.tensor([source]), torch.tensor([text])
    masks = {"attention_mask": torch.ones_like(ids), "decoder_attention_mask": torch.ones_like(decoder_ids)}
    hf = made(name).to(dtype)
    logits: Tensor = hf(input_ids=ids, decoder_input_ids=decoder_ids, **masks, use_cache=False).logits[0]
    return logits


def new_cache(model: LanguageModel, sources: Sequence[Sequence[int]], room: int = 64) -> KVCache:
    return model.scratch_cache([room] * len(sources), sources=[TokenSource(tuple(source)) for source in sources])


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """The relative error of each row."""
    return (ours.double() - theirs).norm(dim=-1) / theirs.norm(dim=-1)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_transformers_in_float32(name: str) -> None:
    """Past the distance from which T5's bias is constant, and with several sources and texts in a pass."""
    model = loaded(name)
    assert isinstance(model.body, SourceStackBody)
    sources, texts = random_ids(SOURCE_LENS, 1), random_ids(LENS, 2)
    cache = new_cache(model, sources)
    beginnings = [len(text) // 2 for text in texts]
    parts = [
        torch.split(model.read([Read(i, rows, len(rows)) for i, rows in enumerate(cut)], cache), list(map(len, cut)))
        for cut in zip(*([text[:n], text[n:]] for text, n in zip(texts, beginnings, strict=True)), strict=True)
    ]
    for first, second, source, text in zip(*parts, sources, texts, strict=True):
        theirs = reference(name, source, text).double()
        error = relative_error(torch.cat([first, second]), theirs)
        of_library = relative_error(reference(name, source, text, torch.bfloat16), theirs)
        assert error.median() < max(
            0.03, float(of_library.median())
        )  # on some texts transformers itself in bfloat16 is farther away
        assert error.max() < 0.12


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_generating_in_one_call_equals_step_by_step(name: str) -> None:
    """With texts of different lengths after sources of different lengths."""
    model, sources, lens = loaded(name), random_ids(SOURCE_LENS, 3), [5, 1, 9, 3]
    reads = [Read(i, ids, 1) for i, ids in enumerate(random_ids([2, 7, 1, 4], 4))]
    for specs in (
        [DrawSpec()] * 4,
        [DrawSpec(0.7, (5, 0.9, 0.0), uniforms=[0.1 * (i + 1)] * n) for i, n in enumerate(lens)],
    ):
        at_once, one_by_one = new_cache(model, sources), new_cache(model, sources)
        ours = model.generate(reads, lens, VOCAB_SIZE, at_once, specs)
        theirs = generate_step_by_step(partial(model.read, cache=one_by_one), reads, lens, VOCAB_SIZE, specs)
        assert ours.ids == theirs.ids
        assert list(map(len, ours.ids)) == lens
        for i in range(4):
            assert at_once.region(i).tokens == one_by_one.region(i).tokens
            for layer in at_once.region(i).layers:
                for a, b in zip(at_once.region(i).layer(layer), one_by_one.region(i).layer(layer), strict=True):
                    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["t5", "bart", "mbart"])
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    model, sources, texts = loaded(name), random_ids(SOURCE_LENS, 5), random_ids(LENS, 6)
    reads = [Read(i, text, len(text)) for i, text in enumerate(texts)]
    before, read = torch.get_num_threads(), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        read.append(model.read(reads, new_cache(model, sources)))
    torch.set_num_threads(before)
    assert torch.equal(read[0], read[1])
    assert torch.equal(read[0], read[2])


def _with_a_module(hf: Any) -> None:
    hf.get_decoder().block[0].layer[0].SelfAttention.gate = nn.Linear(4, 4)


def _with_another_activation(hf: Any) -> None:
    hf.get_encoder().block[1].layer[1].DenseReluDense.act = nn.Mish()


@pytest.mark.parametrize("change", [_with_a_module, _with_another_activation])
def test_a_model_that_deviates_from_its_family_is_run_by_transformers(change: Callable[[Any], None]) -> None:
    hf = random_model(ENCODER_DECODERS["t5"].config())
    assert has_source_stack_form(hf)
    change(hf)
    assert not has_source_stack_form(hf)


@pytest.mark.parametrize("name", BY_THE_LIBRARY)
def test_families_without_a_compiled_form_are_run_by_transformers(name: str) -> None:
    hf = random_model(ENCODER_DECODERS[name].config()).bfloat16()
    assert isinstance(prepare(hf, name, BF16), EncoderDecoderBody)


def test_reads_outside_of_memory_are_refused() -> None:
    body = loaded("bart").body
    assert isinstance(body, SourceStackBody)
    model, (source,) = loaded("bart"), random_ids([5], 6)
    cache = new_cache(model, [source], room=320)
    cache.region(0).tokens = [3] * 260
    with pytest.raises(ValueError, match="positions must be from 0 to 255: got 260"):
        model.read([Read(0, [4], 1)], cache)
    cache.region(0).tokens = [3] * 252
    with pytest.raises(ValueError, match="positions must be from 0 to 255: 256 would be generated"):
        model.generate([Read(0, [4], 1)], [5], VOCAB_SIZE, cache, [DrawSpec()])
    cache.region(0).tokens, cache.region(0).source = [], None
    with pytest.raises(ValueError, match="spans must have sources if the decoder attends to sources"):
        model.read([Read(0, [4], 1)], cache)
