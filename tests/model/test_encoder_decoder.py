"""Every supported encoder-decoder, as a flattened ragged batch, compared with separate passes of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.sources import TokenSource
from foredraft.errors import ModelError
from foredraft.kernels import load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.model.loading import refuse_unsupported
from foredraft.model.prepare import prepare
from foredraft.model.source_probe import probe_encoder_decoder
from tests.model.zoo import ENCODER_DECODERS, VOCAB_SIZE, random_model

SOURCE_LENS, LENS = (11, 60, 1, 30), (10, 45, 18, 1)


@cache
def loaded(name: str) -> LanguageModel:
    """A random model whose logits have a standard deviation of 1, so that its head does not magnify rounding errors."""
    return load_model(random_model(ENCODER_DECODERS[name].config(), sharpness=1.0), LoadOptions())


def random_ids(lens: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lens]


def own_logits(hf: PreTrainedModel, source: Sequence[int], text: Sequence[int]) -> Tensor:
    """transformers' logits, in a pass of its own, with its own attention."""
    ids, decoder_ids = torch.tensor([source]), torch.tensor([text])
    # with masks, since some families treat an id as padding
    masks = {"attention_mask": torch.ones_like(ids), "decoder_attention_mask": torch.ones_like(decoder_ids)}
    with torch.inference_mode():
        logits: Tensor = hf(input_ids=ids, decoder_input_ids=decoder_ids, **masks, use_cache=False).logits[0]
    return logits


def open_cache(model: LanguageModel, sources: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> KVCache:
    cache = model.new_cache(MemoryPool(1 << 30))
    for seq_id, (source, text) in enumerate(zip(sources, texts, strict=True)):
        assert cache.open(seq_id, TokenSource(tuple(source)))
        assert cache.reserve(seq_id, len(text))
    return cache


def read_in_chunks(model: LanguageModel, cache: KVCache, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Every text's logits. Each text advances by its own number of tokens in each pass, and a pass has all texts that are not done."""

    def sizes() -> Iterator[int]:
        while True:
            yield from (7, 1, 5, 2, 11, 3, 1)

    size, done = sizes(), [0] * len(texts)
    parts: list[list[Tensor]] = [[] for _ in texts]
    while any(n < len(text) for n, text in zip(done, texts, strict=True)):
        chunks = {i: text[n : n + next(size)] for i, (n, text) in enumerate(zip(done, texts, strict=True))}
        reads = [Read(i, chunk, len(chunk)) for i, chunk in chunks.items() if chunk]
        logits = torch.split(model.read(reads, cache), [read.num_logits for read in reads])
        for read, part in zip(reads, logits, strict=True):
            parts[read.seq_id].append(part)
            done[read.seq_id] += len(read.tokens)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_logits_of_a_ragged_batch_are_those_of_separate_passes(name: str) -> None:
    """Past every window, and past the distance from which T5's bias is constant."""
    model = loaded(name)
    sources, texts = random_ids(SOURCE_LENS, 1), random_ids(LENS, 2)
    measured = read_in_chunks(model, open_cache(model, sources, texts), texts)
    for ours, source, text in zip(measured, sources, texts, strict=True):
        assert float((ours - own_logits(model.hf, source, text)).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_rows_of_a_tree_are_those_of_their_chains(name: str) -> None:
    model = loaded(name)
    (source,), (text,) = random_ids([23], 3), random_ids([9], 4)
    cache = open_cache(model, [source], [[*text, *range(6)]])
    drafted, parents = [5, 6, 7, 8, 9], [-1, 0, -1, 2, 2]
    model.read([Read(0, text[:-1], 0)], cache)
    tree = [-1, *(parent + 1 for parent in parents)]
    logits = model.read([Read(0, [text[-1], *drafted], 6, tree)], cache)
    for node, path in {1: [5], 2: [5, 6], 3: [7], 4: [7, 8], 5: [7, 9]}.items():
        expected = own_logits(model.hf, source, [*text, *path])[-1]
        assert float((logits[node] - expected).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_padding_and_start_ids_in_a_text_are_ordinary_tokens(name: str) -> None:
    """Some families in transformers count positions by the padding id, but generated texts have no padding."""
    model = loaded(name)
    (source,), (text,) = random_ids([8], 5), random_ids([12], 6)
    text[0] = model.traits.start_ids[0]
    (measured,) = read_in_chunks(model, open_cache(model, [source], [text]), [text])
    assert float((measured - own_logits(model.hf, source, text)).abs().max()) <= 1e-4


def test_the_users_attention_implementation_is_kept() -> None:
    """Also in T5, whose stacks have their own configurations."""
    model = loaded("t5")
    before = [config._attn_implementation for config in (model.hf.config, model.hf.get_decoder().config)]
    cache = open_cache(model, [[4, 5]], [[0, 7]])
    model.read([Read(0, [0, 7], 1)], cache)
    after = [config._attn_implementation for config in (model.hf.config, model.hf.get_decoder().config)]
    assert after == before
    assert "foredraft" not in after


@pytest.mark.parametrize(
    "kind", ["longt5", "switch_transformers", "led", "prophetnet", "speech_to_text", "vision-encoder-decoder"]
)
def test_unsupported_encoder_decoders_are_refused_by_name(kind: str) -> None:
    config = object.__new__(CONFIG_MAPPING[kind])
    config.__dict__["is_encoder_decoder"] = True
    with pytest.raises(ModelError, match=rf"an encoder-decoder \({kind}\) that .* are supported"):
        refuse_unsupported(config, "some/model")


def test_a_decoder_start_token_is_required() -> None:
    config = ENCODER_DECODERS["bart"].config()
    config.decoder_start_token_id = None
    with pytest.raises(ModelError, match="set decoder_start_token_id"):
        load_model(AutoModelForSeq2SeqLM.from_config(config), LoadOptions())


COMPILED = {
    "bfloat16": LoadOptions(dtype="bfloat16", device="cpu"),
    "int8": LoadOptions(device="cpu", quantization="int8"),
    "int4": LoadOptions(device="cpu", quantization="int4"),
}
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")


@cache
def compiled(name: str, precision: str) -> LanguageModel:
    """A model with packed matrices, as if loaded from a checkpoint."""
    hf, options = random_model(ENCODER_DECODERS[name].config()), COMPILED[precision]
    if options.is_rounded:
        return load_model(hf, options)
    return probe_encoder_decoder(hf.bfloat16(), name, lambda ours: prepare(ours, name, options))


FORMS = [*((name, "int8") for name in ENCODER_DECODERS), ("t5", "bfloat16"), ("t5gemma", "bfloat16"), ("t5", "int4")]


@needs_kernels
@pytest.mark.parametrize(("name", "precision"), FORMS)
def test_rows_of_packed_models_have_the_same_bits_in_every_batch(name: str, precision: str) -> None:
    """Loading compares logits with transformers'. This compares texts in chunks and batches with each text alone in one pass."""
    model = compiled(name, precision)
    assert model.traits.row_exact
    sources, texts = random_ids(SOURCE_LENS, 1), random_ids(LENS, 2)
    together = read_in_chunks(model, open_cache(model, sources, texts), texts)
    for ours, source, text in zip(together, sources, texts, strict=True):
        alone = model.read([Read(0, text, len(text))], open_cache(model, [source], [text]))
        assert torch.equal(ours, alone)


@needs_kernels
@pytest.mark.parametrize(("name", "precision"), [("t5", "bfloat16"), ("bart", "int8"), ("t5gemma", "int8")])
def test_rows_of_a_tree_have_the_bits_of_their_chains(name: str, precision: str) -> None:
    model = compiled(name, precision)
    (source,), (text,) = random_ids([23], 3), random_ids([19], 4)
    cache = open_cache(model, [source], [[*text, *range(6)]])
    model.read([Read(0, text[:-1], 0)], cache)
    logits = model.read([Read(0, [text[-1], 5, 6, 7, 8, 9], 6, [-1, 0, 1, 0, 3, 3])], cache)
    for node, path in {0: [], 1: [5], 2: [5, 6], 3: [7], 4: [7, 8], 5: [7, 9]}.items():
        chain = [*text, *path]
        expected = model.read([Read(0, chain, 1)], open_cache(model, [source], [chain]))
        assert torch.equal(logits[node], expected[0])


def test_a_quantized_encoder_decoder_is_refused() -> None:
    hf = random_model(ENCODER_DECODERS["t5"].config())
    hf.is_quantized = True  # as transformers marks one
    hf.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match=r"a quantized encoder-decoder \(fp8\); give a floating-point checkpoint"):
        load_model(hf, LoadOptions())


@pytest.mark.parametrize("name", ["t5", "bart", "t5gemma"])
def test_a_bfloat16_model_in_memory_gives_the_logits_of_transformers(name: str) -> None:
    """Loading compares the two. The user's model keeps its layers, with PyTorch's products."""
    model = load_model(random_model(ENCODER_DECODERS[name].config()).bfloat16(), LoadOptions())
    assert not model.traits.row_exact
    assert model.traits.bytes_per_source_token == loaded(name).traits.bytes_per_source_token // 2


def test_a_source_is_read_whole_or_not_at_all() -> None:
    model = loaded("t5")
    cache = open_cache(model, [[4, 5]], [[0, 7]])
    last = model.hf.get_decoder().block[-1].layer[1].EncDecAttention.v

    def fail(*_: object) -> None:
        raise MemoryError

    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        model.read([Read(0, [0], 1)], cache)
    handle.remove()
    source = cache.source(0)
    assert source is not None
    assert not source.is_read
    model.read([Read(0, [0], 1)], cache)
    assert source.is_read
