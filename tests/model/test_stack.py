"""A decoder as one compiled call: it gives transformers' logits, the same bits in every batch, and generates tokens in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.region import Region
from foredraft.engine.token_tree import ROOT
from foredraft.kernels import DrawSpec, load_kernels, why_none
from foredraft.llm import LLM
from foredraft.model import LanguageModel, LoadOptions, Read, load_model, prepare, probe
from foredraft.model.batch import RaggedBatch, Span
from foredraft.model.generation import Generated, generate_step_by_step
from foredraft.model.library import LibraryBody
from foredraft.model.packed import NativeLinear
from foredraft.model.rotary import rotation_table
from foredraft.model.stack import StackBody, has_stack_form
from foredraft.model.taps import FINAL_NORM
from foredraft.sampling import Row, Sampler, SamplingParams, choose, draw_specs, inverse_cdf, search
from foredraft.utils.machine import cpu_features
from tests.model.reference import hidden_states
from tests.model.zoo import (
    COMPILED_FAMILIES,
    COMPILED_FORMS,
    SPECIES,
    VOCAB_SIZE,
    WINDOW,
    Maker,
    Species,
    random_model,
    rope,
    saved,
)

pytestmark = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")

BF16 = LoadOptions(dtype="bfloat16", device="cpu")
INT8 = LoadOptions(device="cpu", quantization="int8")
PAST_WINDOW = 3 * WINDOW + 5


NOT_TAKEN: dict[str, Species] = {
    "another activation": Species("llama", {"hidden_act": "mish"}),
    "another activation in a plain mlp": Species("starcoder2", {"hidden_act": "quick_gelu"}),
    "another class": SPECIES["gpt_neox"],
}


@pytest.fixture(scope="module")
def species(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """species(name): a directory with a random model of that species."""

    @cache
    def make(name: str) -> Path:
        return saved({**COMPILED_FORMS, **NOT_TAKEN}[name].config(), tmp_path_factory.mktemp("species"))

    return make


@cache
def loaded(directory: Path, options: LoadOptions = BF16) -> LanguageModel:
    return load_model(directory, options)


@cache
def in_float32(directory: Path) -> Any:
    """transformers' model with weights that bfloat16 can represent."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@torch.inference_mode()
def reference(directory: Path, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = in_float32(directory)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def random_tokens(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def room_for(model: LanguageModel, *lengths: int) -> KVCache:
    cache = model.new_cache(MemoryPool(1 << 30))
    for seq_id, length in enumerate(lengths):
        assert cache.reserve(seq_id, length)
    return cache


def read_in_pieces(model: LanguageModel, tokens: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Region]:
    cache, parts, done = room_for(model, len(tokens)), [], 0
    for size in cycle(sizes):
        piece = tokens[done : done + size]
        if not piece:
            return torch.cat(parts), cache.region(0)
        parts.append(model.read([Read(0, piece, len(piece))], cache))
        done += size
    raise AssertionError


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = 0.03) -> None:
    """Assert that half of the rows are within the relative tolerance, and all within four times that. A leak would move a row by 1."""
    error = (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)
    assert error.median() < tolerance
    assert error.max() < 4 * tolerance


def assert_same_caches(a: Region, b: Region) -> None:
    assert a.tokens == b.tokens
    assert a.layers == b.layers
    for layer in a.layers:
        for ours, theirs in zip(a.layer(layer), b.layer(layer), strict=True):
            assert torch.equal(ours, theirs)


# Reading


@pytest.mark.parametrize("name", COMPILED_FORMS)
def test_features_are_the_hidden_states_of_transformers(name: str, species: Maker) -> None:
    model, hf = loaded(species(name)), in_float32(species(name))
    tokens, num_layers = random_tokens(PAST_WINDOW), hf.config.num_hidden_layers
    taps = (FINAL_NORM, 1, num_layers, 0)
    cache = model.new_cache(MemoryPool(1 << 30), taps)
    assert cache.reserve(0, len(tokens))
    model.read([Read(0, tokens[:9], 1)], cache)
    model.read([Read(0, tokens[9:], 2)], cache)
    features = cache.features(0)
    assert features is not None
    width = hf.config.hidden_size
    for ours, theirs in zip(features.split(width, 1), hidden_states(hf, tokens, taps).split(width, 1), strict=True):
        assert_near(ours, theirs)


def test_features_are_written_to_the_slots_of_their_rows(species: Maker) -> None:
    """In a batch of a chain and a tree, of which the cache keeps one path."""
    model, taps, tokens = loaded(species("llama")), (FINAL_NORM, 1), random_tokens(12)
    cache = model.new_cache(MemoryPool(1 << 30), taps)
    assert all(cache.reserve(seq_id, 20) for seq_id in range(3))
    model.read([Read(0, tokens, 0)], cache)
    model.read([Read(1, tokens[:9], 0)], cache)
    other = (tokens[9] + 1) % model.traits.vocab_size
    tree = Read(1, [other, tokens[9], tokens[10], tokens[11]], 4, [ROOT, ROOT, 1, 2])
    model.read([Read(2, tokens[:5], 0), tree], cache)
    cache.keep_prefix_of(1, tokens)
    whole = cache.features(0)
    assert whole is not None
    for seq_id, length in ((1, 12), (2, 5)):
        features = cache.features(seq_id)
        assert features is not None
        assert torch.equal(features, whole[:length])


@pytest.mark.parametrize("name", COMPILED_FORMS)
def test_logits_are_those_of_transformers_in_float32(name: str, species: Maker) -> None:
    model = loaded(species(name))
    assert isinstance(model.body, StackBody)
    tokens = random_tokens(PAST_WINDOW)
    logits, region = read_in_pieces(model, tokens, [7, 1, 20, 2])
    assert_near(logits, reference(species(name), tokens))
    assert region.tokens == tokens


@pytest.mark.parametrize("options", [pytest.param(BF16, marks=pytest.mark.slow), INT8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", COMPILED_FORMS)
def test_a_row_has_the_same_bits_in_every_batch(name: str, options: LoadOptions, species: Maker) -> None:
    model = loaded(species(name), options)
    assert isinstance(model.body, StackBody)
    assert model.traits.row_exact
    tokens, company = random_tokens(PAST_WINDOW), random_tokens(9, 1)
    both = room_for(model, len(company), len(tokens))
    whole = model.read([Read(0, company, 9), Read(1, tokens, len(tokens))], both)[9:]
    for num_threads, sizes in ((1, [1]), (1, [3, 8, 9, 2]), (2, [16, 1]), (3, [5])):
        torch.set_num_threads(num_threads)
        pieces, region = read_in_pieces(model, tokens, sizes)
        assert torch.equal(pieces, whole)
        assert_same_caches(region, both.region(1))


def test_logits_are_not_rounded_to_bfloat16(species: Maker) -> None:
    """bfloat16 is so coarse that two tokens in a hundred would tie with a likelier one."""
    logits, _ = read_in_pieces(loaded(species("llama")), random_tokens(20), [20])
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def test_int8_logits_are_near_the_unquantized_ones(species: Maker) -> None:
    tokens = random_tokens(20)
    logits, _ = read_in_pieces(loaded(species("llama"), INT8), tokens, [20])
    exact, _ = read_in_pieces(loaded(species("llama")), tokens, [20])
    assert_near(logits, exact, 0.1)
    assert not torch.equal(logits, exact)


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_other_forms_are_run_by_transformers(name: str, species: Maker) -> None:
    model = loaded(species(name))
    assert isinstance(model.body, LibraryBody)
    assert not has_stack_form(in_float32(species(name)))
    tokens = random_tokens(PAST_WINDOW)
    logits, _ = read_in_pieces(model, tokens, [7, 1, 20, 2])
    assert_near(logits, reference(species(name), tokens))


def test_unusual_rotary_embeddings_and_layers_have_no_stack_form() -> None:
    config = SPECIES["llama"].config()
    assert has_stack_form(random_model(config))
    turned_in_part = random_model(config)
    turned_in_part.model.rotary_emb.inv_freq = turned_in_part.model.rotary_emb.inv_freq[:4]
    assert not has_stack_form(turned_in_part)

    class Other(torch.nn.Linear):
        """Stands for a quantised layer, or one with an adapter."""

    changed = random_model(config)
    changed.model.layers[1].mlp.down_proj.__class__ = Other
    assert not has_stack_form(changed)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", {"hidden_act": "quick_gelu"}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("smollm3", {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}),
    ],
)
def test_models_with_unsupported_settings_have_no_stack_form(name: str, settings: dict[str, Any]) -> None:
    species = SPECIES[name]
    assert has_stack_form(random_model(species.config()))
    other = replace(species, settings={**species.settings, **settings})
    assert not has_stack_form(random_model(other.config()))


def test_models_with_unsupported_weights_have_no_stack_form() -> None:
    model = random_model(SPECIES["gemma2"].config())
    model.model.layers[1].mlp.extra = torch.nn.LayerNorm(8)
    assert not has_stack_form(model)
    model = random_model(SPECIES["olmo2"].config())
    model.model.layers[0].post_attention_layernorm.variance_epsilon = 0.5
    assert not has_stack_form(model)


@pytest.mark.parametrize("options", [BF16, INT8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_only_the_chosen_experts_are_read(name: str, options: LoadOptions, species: Maker) -> None:
    """As many as transformers' routers choose, each counted once for a pass."""
    model = loaded(species(name), options)
    assert isinstance(model.body, StackBody)
    chosen: list[set[int]] = []
    library = in_float32(species(name))
    routers = [module for module in library.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(set(out[2].flatten().tolist())))
        for router in routers
    ]
    for num_tokens in (1, 3):
        chosen.clear()
        tokens = random_tokens(num_tokens)
        reference(species(name), tokens)
        before = model.body.num_experts_read
        read_in_pieces(model, tokens, [num_tokens])
        assert model.body.num_experts_read - before == sum(map(len, chosen))
        assert len(chosen) == len(routers) == 2
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("options", [BF16, INT8], ids=["bfloat16", "int8"])
@torch.inference_mode()
def test_a_tied_head_is_the_embedding(options: LoadOptions, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Species("qwen2", {"tie_word_embeddings": True}).config()
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in hf.parameters():
        parameter.data = (
            1.0 + 0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else torch.randn_like(parameter) / 8
        )
    hf.save_pretrained(tmp_path)
    tokens = random_tokens(20)
    model = load_model(tmp_path, options)
    assert isinstance(model.body, StackBody)
    logits, _ = read_in_pieces(model, tokens, [6, 14])
    assert_near(logits, reference(tmp_path, tokens), 0.03 if options is BF16 else 0.1)


# Positions


def long_model(directory: Path, context_len: int, **settings: Any) -> Path:
    return saved(Species("llama", {"max_position_embeddings": context_len, **settings}).config(), directory)


@pytest.mark.parametrize("name", ["llama3 rope", "yarn rope", "llama"])
def test_rotary_angles_do_not_change_as_the_table_grows(name: str, species: Maker) -> None:
    model = loaded(species(name))
    assert isinstance(model.body, StackBody)
    first = rotation_table(model.hf, 512)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for size in (513, 1021, 5000):
            for known, grown in zip(first, rotation_table(model.hf, size), strict=True):
                assert torch.equal(known, grown[:512])


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_positions_beyond_the_first_table_are_right(rope_type: str, tmp_path: Path) -> None:
    """Some rotary embeddings change for positions past the model's context, which must not be computed."""
    directory = long_model(tmp_path, 620, **rope(rope_type, factor=4.0))
    model = load_model(directory, BF16)
    assert isinstance(model.body, StackBody)
    tokens = random_tokens(600)
    logits, _ = read_in_pieces(model, tokens, [250, 255, 20])
    assert_near(logits, reference(directory, tokens))
    assert torch.equal(read_in_pieces(load_model(directory, BF16), tokens, [600])[0], logits)


# Generating


def step_by_step(
    model: LanguageModel,
    reads: Sequence[Read],
    lens: Sequence[int],
    vocab_size: int,
    cache: KVCache,
    specs: Sequence[DrawSpec],
) -> Generated:
    return generate_step_by_step(partial(model.read, cache=cache), reads, lens, vocab_size, specs)


def generate_both_ways(
    model: LanguageModel, prompts: Sequence[list[int]], lens: Sequence[int], vocab_size: int, held: int = 0
) -> list[list[int]]:
    """Generate in one call and step by step, with `held` tokens of each prompt read before. Asserts that text and cache are the same."""
    caches = [room_for(model, *(len(prompt) + n - 1 for prompt, n in zip(prompts, lens, strict=True))) for _ in "ab"]
    reads = [Read(i, prompt[min(held, len(prompt) - 1) :], 1) for i, prompt in enumerate(prompts)]
    before = [Read(i, prompt[: min(held, len(prompt) - 1)], 0) for i, prompt in enumerate(prompts)]
    before = [read for read in before if read.tokens]
    if before:
        for cache in caches:
            model.read(before, cache)
    greedy = [DrawSpec()] * len(reads)
    generated = model.generate(reads, lens, vocab_size, caches[0], greedy).ids
    assert generated == step_by_step(model, reads, lens, vocab_size, caches[1], greedy).ids
    for i, prompt in enumerate(prompts):
        region = caches[0].region(i)
        assert region.tokens == [*prompt, *generated[i][:-1]]
        assert_same_caches(region, caches[1].region(i))
    return generated


@pytest.mark.parametrize("options", [BF16, INT8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "odd widths", *COMPILED_FAMILIES])
def test_generating_in_one_call_equals_step_by_step(name: str, options: LoadOptions, species: Maker) -> None:
    model = loaded(species(name), options)
    width = model.traits.vocab_size
    prompts = [random_tokens(n, n) for n in (1, 30, 7, 15, 2)]
    for lens, held in (([1] * 5, 0), ([5, 1, 18, 2, 40], 0), ([33, 1, 1, 1, 1], 5), ([3, 9, 2, 7, 1], 100)):
        generated = generate_both_ways(model, prompts, lens, width, held)
        assert [len(tokens) for tokens in generated] == lens
        narrow = generate_both_ways(model, prompts, lens, 17, held)
        assert max(max(tokens) for tokens in narrow) < 17
        assert generate_both_ways(model, prompts, lens, 10 * width, held) == generated
        for i, prompt in enumerate(prompts):
            assert generate_both_ways(model, [prompt], lens[i : i + 1], width, held) == generated[i : i + 1]


CUTS: list[tuple[int, float, float] | None] = [None, (0, 0.9, 0.0), (7, 1.0, 0.0), (30, 0.8, 0.01)]


@pytest.mark.parametrize("cuts", [*([cut] for cut in CUTS), CUTS], ids=str)
@pytest.mark.parametrize("name", ["llama", "odd widths"])
def test_drawn_tokens_come_from_the_distributions_that_are_returned(
    cuts: list[tuple[int, float, float] | None], name: str, species: Maker
) -> None:
    """Exactly, given the returned numbers, which are the distributions of the logits as step by step."""
    model = loaded(species(name))
    lens, vocab_size = [4, 1, 6, 3, 2], 90
    prompts = [random_tokens(n, n) for n in (1, 30, 7, 15, 2)]
    uniforms = torch.rand(16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = [part.tolist() for part in uniforms.split(lens)]
    specs = [DrawSpec(1.3, cut, part) for cut, part in zip(cycle(cuts), parts, strict=False)]
    specs[3] = DrawSpec(1.3, specs[3].truncation, keys=[5, 6, 7])
    reads = [Read(i, prompt, 1) for i, prompt in enumerate(prompts)]
    ours, theirs = (
        generate(reads, lens, vocab_size, room_for(model, *[64] * 5), specs)
        for generate in (model.generate, partial(step_by_step, model))
    )
    assert ours.ids == theirs.ids
    assert ours.token_probs is not None
    assert theirs.token_probs is not None
    used = torch.cat([uniforms[:11], uniforms[14:]])
    columns = inverse_cdf(ours.token_probs.probs, used)
    assert ours.token_probs.id_at(columns).tolist() == [token for i in (0, 1, 2, 4) for token in ours.ids[i]]
    dense = ours.token_probs.dense(vocab_size)
    torch.testing.assert_close(dense.sum(1), torch.ones(13), rtol=0, atol=1e-5)
    torch.testing.assert_close(dense, theirs.token_probs.dense(vocab_size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_shared_noise_gives_the_tokens_of_the_sampler(cut: tuple[int, float, float] | None, species: Maker) -> None:
    model = loaded(species("llama"))
    top_k, top_p, min_p = cut or (0, 1.0, 0.0)
    params = SamplingParams(temperature=1.1, top_k=top_k, top_p=top_p, min_p=min_p, seed=3).resolve({})
    prompt = random_tokens(9)
    row = Row(Sampler(params, prompt, torch.Generator()), prompt)
    generated = model.generate([Read(0, prompt, 1)], [12], VOCAB_SIZE, room_for(model, 32), draw_specs([row], [12]))
    logits, _ = read_in_pieces(model, [*prompt, *generated.ids[0][:-1]], [30])
    rows = [row._replace(drafted=generated.ids[0][:i]) for i in range(12)]
    assert choose(logits[8:], rows).ids == generated.ids[0]
    assert generated.token_probs is None


def test_generating_on_two_threads_gives_the_same(species: Maker) -> None:
    model = loaded(species("odd widths"))
    prompts, lens = [random_tokens(n, n) for n in (1, 12, 7)], [3, 1, 5]
    alone = generate_both_ways(model, prompts, lens, 101)
    torch.set_num_threads(2)
    assert generate_both_ways(model, prompts, lens, 101) == alone


def test_generating_past_the_first_table_of_positions_works(tmp_path: Path) -> None:
    directory = long_model(tmp_path, 2048)
    prompts = [random_tokens(n, n) for n in (505, 3, 511, 512)]
    model = load_model(directory, BF16)
    generated = generate_both_ways(model, prompts, [30, 4, 2, 1], VOCAB_SIZE)
    for prompt, tokens in zip(prompts, generated, strict=True):
        again, _ = read_in_pieces(load_model(directory, BF16), [*prompt, *tokens[:-1]], [1000])
        assert again[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def test_generating_to_the_end_of_the_context_works(species: Maker) -> None:
    model = loaded(species("llama"))
    length = model.traits.context_len
    (generated,) = generate_both_ways(model, [random_tokens(length - 6)], [7], VOCAB_SIZE)
    assert len(generated) == 7


def test_no_more_is_generated_than_there_is_room_for(species: Maker) -> None:
    model = loaded(species("llama"))
    cache = room_for(model, 64)
    with pytest.raises(RuntimeError, match="no room"):
        model.generate([Read(0, [1] * 60, 1)], [6], VOCAB_SIZE, cache, [DrawSpec()])
    assert cache.region(0).tokens == []


def test_nan_ends_only_the_tokens_of_its_sequence(species: Maker) -> None:
    """A token whose embedding is NaN is generated, and nothing after it."""
    model = load_model(species("llama"), BF16)
    prompts = [random_tokens(n, n) for n in (11, 5)]
    lens = [12, 12]
    first, second = generate_both_ways(model, prompts, lens, VOCAB_SIZE)
    place = next(
        i for i, token in enumerate(first) if i > 1 and token not in {*prompts[0], *prompts[1], *second, *first[:i]}
    )
    model.hf.get_input_embeddings().weight.data[first[place]] = torch.nan
    cache = room_for(model, 32, 32)
    reads = [Read(i, prompt, 1) for i, prompt in enumerate(prompts)]
    assert model.generate(reads, lens, VOCAB_SIZE, cache, [DrawSpec()] * 2).ids == [first[: place + 1], second]
    assert cache.region(1).tokens == [*prompts[1], *second[:-1]]
    held = cache.region(0).tokens
    assert held == [*prompts[0], *first[: place + 1]][: len(held)]
    assert len(held) >= len(prompts[0]) + place
    poisoned = [first[place]]
    assert model.generate([Read(2, poisoned, 1)], [3], VOCAB_SIZE, _with_room(cache, 2), [DrawSpec()]).ids == [[]]


def _with_room(cache: KVCache, seq_id: int) -> KVCache:
    assert cache.reserve(seq_id, 16)
    return cache


# Without the kernels


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_without_kernels_drafts_change_no_text(
    name: str, quantization: str | None, checkpoint: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prepare, search):
        monkeypatch.setattr(module, "load_kernels", lambda: None)
    settings = {"dtype": "bfloat16", "device": "cpu", "quantization": quantization}
    llm = LLM(checkpoint(name), draft_model=checkpoint(name, 1), **settings)
    for model in (llm.target, llm.draft):
        assert model is not None
        assert isinstance(model.body, LibraryBody)
        assert not [m for m in model.hf.modules() if isinstance(m, NativeLinear)]
    is_exact = "amx_bf16" not in cpu_features()
    assert llm.target.traits.row_exact == is_exact
    prompts = [random_tokens(n, n) for n in (4, 25)]
    texts = []
    for gamma in (0, 3):
        params = SamplingParams(temperature=0.0, max_tokens=24, speculative_tokens=gamma, ignore_eos=True)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1] or not is_exact


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_torch_products_by_amx_are_never_called_exact(
    quantization: str | None, checkpoint: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of PyTorch's sums depends on the numbers of rows and keys; that of ours does not."""
    monkeypatch.setattr(probe, "cpu_features", lambda: ["amx_bf16"])
    options = replace(BF16, quantization=quantization)
    assert loaded(checkpoint("llama"), options).traits.row_exact
    assert not loaded(checkpoint("llama"), replace(options, kernels="torch")).traits.row_exact


def test_kernels_can_be_declined(checkpoint: Maker) -> None:
    declined = LoadOptions(dtype="bfloat16", device="cpu", kernels="torch")
    for name in ("llama", "gpt2"):
        model = load_model(checkpoint(name), declined)
        assert isinstance(model.body, LibraryBody)
        assert not [m for m in model.hf.modules() if isinstance(m, NativeLinear)]


def test_torch_kernels_give_the_logits_of_ours(checkpoint: Maker) -> None:
    for options in (BF16, INT8):
        plain = LoadOptions(dtype=options.dtype, device="cpu", quantization=options.quantization, kernels="torch")
        tokens = random_tokens(40)
        ours, _ = read_in_pieces(loaded(checkpoint("llama"), options), tokens, [9])
        theirs, _ = read_in_pieces(load_model(checkpoint("llama"), plain), tokens, [9])
        assert_near(ours, theirs, 0.06)


def test_invalid_rows_are_refused(species: Maker) -> None:
    """Kernels read raw addresses: a row before the first would be other memory."""
    model = loaded(species("llama"))
    cache = model.new_cache(MemoryPool(1 << 30))
    assert cache.reserve(0, 8)
    spans = [Span(cache.region(0), 0, 2, 0)]
    for wanted in ([2], [-1]):
        with pytest.raises(ValueError, match="rows must be from 0 to 1"):
            model.body(RaggedBatch([1, 2], [0, 1], [0, 1], spans, wanted))
    with pytest.raises(RuntimeError, match="sequence 0: 3 rows of logits were requested for 2 tokens"):
        model.read([Read(0, [1, 2], 3)], cache)
