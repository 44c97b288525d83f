"""Measure what an encoder-decoder can do when it is loaded, as for any model (see probe.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.sources import Source
from foredraft.errors import ModelError, one_line
from foredraft.model.batch import Read
from foredraft.model.context import context_len_of
from foredraft.model.encoder_inputs import encoder_inputs_of, feature_shape_of
from foredraft.model.input_rounding import GroupOf, never, rounded_inputs
from foredraft.model.language_model import Body, LanguageModel, SourceReadingBody, Traits, library_body
from foredraft.model.probe import PRECISE_TOLERANCE, is_precise, relative_error, states_if_rows_agree, tolerance_of
from foredraft.model.start_ids import start_ids_of
from foredraft.model.trial_ids import random_ids

_SOURCE_LENS = (11, 29)
_PASSES = ((1, 1), (5, 2), (1, 6))
"""How many tokens of each of two texts each pass reads."""


def probe_encoder_decoder(
    hf: PreTrainedModel,
    name: str,
    prepare: Callable[[PreTrainedModel], Body] = library_body,
    group_of: GroupOf = never,
) -> LanguageModel:
    """Read short sources and texts in every way the engine will. Raises ModelError, with the reason, if something differs.

    prepare: makes the model's body, after the library's own forward has run. group_of: which inputs that body rounds.
    """
    vocab_size, inputs = int(hf.get_input_embeddings().num_embeddings), encoder_inputs_of(hf, name)
    generator = torch.Generator().manual_seed(0)
    sources = [inputs.random(n, generator) for n in _SOURCE_LENS]
    texts = [random_ids(sum(n), vocab_size, generator) for n in zip(*_PASSES, strict=True)]
    own_logits = partial(_own_logits, hf, name, [inputs.arguments(source) for source in sources], texts)
    expected = own_logits()
    tolerance = _tolerance(hf, own_logits, expected, group_of)
    traits = Traits(
        name,
        expected[0].shape[1],
        context_len_of(hf.get_decoder().config, name),
        0,
        row_exact=False,
        source_len=inputs.source_len,
        start_ids=start_ids_of(hf, name),
        feature_shape=feature_shape_of(hf.config),
    )
    model = LanguageModel(hf, traits, prepare(hf))
    measured, traits, is_in_float32 = _read_in_passes(model, sources, texts)
    if is_in_float32:
        tolerance = PRECISE_TOLERANCE
    for ours, theirs in zip(measured, expected, strict=True):
        if not relative_error(ours, theirs) < tolerance:
            raise ModelError(
                f"{name}: its logits change when texts and sources share a pass ({hf.config.model_type} has positions, or a "
                "state, that attention alone does not explain); use another model"
            )
    return LanguageModel(hf, replace(traits, row_exact=_is_row_exact(model, sources)), model.body)


def _is_row_exact(model: LanguageModel, sources: Sequence[Source]) -> bool:
    """Promised only with the compiled kernels: PyTorch's products over a source sum in an order that depends on its length."""
    if model.body.kernels is None:
        return False
    return states_if_rows_agree(model, sources) is not None


def _tolerance(
    hf: PreTrainedModel, own_logits: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor], group_of: GroupOf
) -> float:
    """See tolerance_of. The largest over all texts, because they are short."""
    with rounded_inputs(hf, group_of, 0) as is_rounded:
        rounded = own_logits() if is_rounded else expected
    return max(map(tolerance_of, rounded, expected))


@torch.inference_mode()
def _own_logits(
    hf: PreTrainedModel, name: str, sources: Sequence[Mapping[str, Tensor]], texts: Sequence[list[int]]
) -> list[Tensor]:
    """The library's logits [length, V] of each text given its source, one by one, so that there is no padding. sources: as
    EncoderInputs.arguments returns them."""
    logits = []
    for source, text in zip(sources, texts, strict=True):
        decoder_ids = torch.tensor([text], device=hf.device)
        try:
            out = hf(
                **source,
                decoder_input_ids=decoder_ids,
                decoder_attention_mask=torch.ones_like(decoder_ids),
                use_cache=False,
            )
        except Exception as error:
            raise ModelError(f"{name}: its own forward pass fails: {one_line(error)}") from error
        logits.append(out.logits[0])
    if not all(bool(rows.isfinite().all()) for rows in logits):
        raise ModelError(f"{name}: its logits are not finite: the weights are damaged, or do not fit this dtype")
    return logits


def _read_in_passes(
    model: LanguageModel, sources: Sequence[Source], texts: Sequence[list[int]]
) -> tuple[list[Tensor], Traits, bool]:
    """The same logits, from passes over all texts together, cut at different places; the traits with the bytes of cache per token; and
    whether the body computes in float32 or more."""
    assert isinstance(model.body, SourceReadingBody)
    cache = model.scratch_cache([len(text) for text in texts], sources=sources)
    parts: list[list[Tensor]] = [[] for _ in texts]
    try:
        for lens in _PASSES:
            starts = [cache.num_held(i) for i in range(len(texts))]
            reads = [
                Read(i, texts[i][start : start + n], n) for i, (start, n) in enumerate(zip(starts, lens, strict=True))
            ]
            for part, rows in zip(parts, torch.split(model.read(reads, cache), list(lens)), strict=True):
                part.append(rows)
    except Exception as error:
        raise ModelError(
            f"{model.traits.name}: it cannot read a ragged batch through transformers' AttentionInterface "
            f"({one_line(error)}); use another model"
        ) from error
    source = cache.source(0)
    assert source is not None
    traits = replace(
        model.traits,
        bytes_per_token=cache.region(0).bytes_per_token,
        bytes_per_source_token=source.bytes_per_token,
    )
    return [torch.cat(part) for part in parts], traits, is_precise(cache.region(0))
