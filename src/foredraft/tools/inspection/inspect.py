"""Predicts everything, then loads and measures the models that fit."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from foredraft.engine.engine import NEAR_TIE
from foredraft.engine.models import head_format, options_of_draft
from foredraft.errors import ModelError
from foredraft.heads import attach_head, head_method_of
from foredraft.heads.decoder_draft import (
    decoder_draft_config,
    is_decoder_draft,
    load_decoder_draft,
    why_not_for,
)
from foredraft.model import LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.model.loading import load_config
from foredraft.model.packed import weight_bytes
from foredraft.sampling import AUTO
from foredraft.text.tokenizing import encode_prompt
from foredraft.tools.inspection.heads import measured_costs, predict_head
from foredraft.tools.inspection.memory import memory_report
from foredraft.tools.inspection.prediction import predict
from foredraft.tools.inspection.report import Costs, HeadReport, Inspection, MemoryReport, ModelReport
from foredraft.tools.inspection.vocabularies import compare_vocabularies
from foredraft.utils.machine import process_memory, this_machine

logger = logging.getLogger("foredraft")


Source = str | os.PathLike[str]


def inspect_models(
    target: Source,
    draft: Source | None,
    options: LoadOptions,
    *,
    load: bool = True,
    text: str | None = None,
    heterogeneous_vocab: str = AUTO,
) -> Inspection:
    """Predict everything first; if the models fit, load and measure them.

    draft: a draft model or a head; None inspects the target alone. load: False only predicts. text: the report gives the share of it
    that a head can draft, or compares the vocabularies of two models on it. heterogeneous_vocab: see LLM.

    Raises ModelError if a checkpoint is missing, corrupt, or of a kind that cannot work.
    """
    sources, head_source, decoder = [(target, options)], None, None
    if draft is not None and head_method_of(os.fspath(draft), options.revision) is not None:
        head_source = draft
    elif draft is not None:
        sources.append((draft, options_of_draft(draft, options, None)))
        decoder = decoder_draft_config(os.fspath(draft), options.revision)
    reports = [predict(source, its_options) for source, its_options in sources]
    tokenizers = [_load_tokenizer(target, options)]
    # a decoder over the target's encoder has the target's tokenizer
    tokenizers += [tokenizers[0] if decoder else _load_tokenizer(*source) for source in sources[1:]]
    reports = [
        replace(report, num_tokens=None if tokenizer is None else len(tokenizer))
        for report, tokenizer in zip(reports, tokenizers, strict=True)
    ]
    head = None if head_source is None else predict_head(head_source, reports[0], options, _ids(tokenizers[0], text))
    # by now, libraries, configurations and tokenizers are loaded, but no weights
    process_bytes = _resident_bytes() if options.torch_device().type == "cpu" else 0
    memory = memory_report(reports, options, process_bytes, is_loaded=False, head=head)
    difference, vocabularies = compare_vocabularies(tokenizers, heterogeneous_vocab, text)
    reason = difference or _too_big(memory)
    if decoder is not None:
        reason = why_not_for(decoder, load_config(os.fspath(target), options).model_type) or reason
    if load and reason is None:
        reports, head, memory = _measure(sources, reports, head, options, process_bytes)
    return Inspection(
        fits=reason is None,
        reason=reason,
        target=reports[0],
        draft=reports[1] if len(reports) > 1 else None,
        memory=memory,
        machine=this_machine(),
        exactness=exactness_of(reports[0]),
        head=head,
        vocabularies=vocabularies,
    )


def exactness_of(target: ModelReport) -> str:
    """How far greedy and seeded outputs are identical to plain decoding's on this machine. The draft model's bits never matter."""
    if target.row_exact is None:
        return "unknown until the target is loaded"
    if target.row_exact:
        return f"bit-identical in {target.dtype}: greedy and seeded texts are identical to plain decoding's, token for token"
    if target.dtype == "float32":
        return f"identical except where the top two of log p + noise are closer than {NEAR_TIE:g}; those are counted"
    return (
        f"identical except at near ties: in {target.dtype} this machine's kernels change a row's last bits depending on "
        f"the other rows of the pass, by more than the {NEAR_TIE:g} within which ties are counted"
    )


def _load_tokenizer(source: Source, options: LoadOptions) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(source, options)
    except ModelError as error:
        logger.warning("%s", error)
        return None


def _resident_bytes() -> int | None:
    memory = process_memory()
    return None if memory is None else memory.resident


def _ids(tokenizer: PreTrainedTokenizerBase | None, text: str | None) -> list[int]:
    """The ids of the text; empty without a tokenizer or a text."""
    return [] if tokenizer is None or text is None else encode_prompt(tokenizer, text)


def _too_big(memory: MemoryReport) -> str | None:
    if memory.weight_bytes is None or memory.available_bytes is None or memory.weight_bytes <= memory.available_bytes:
        return None
    return (
        f"the weights take {memory.weight_bytes / 2**30:.1f} GiB, but only {memory.available_bytes / 2**30:.1f} GiB are free "
        f"on {memory.device}: use smaller models, or a quantised checkpoint"
    )


def _measure(
    sources: list[tuple[Source, LoadOptions]],
    reports: list[ModelReport],
    head: HeadReport | None,
    options: LoadOptions,
    process_bytes: int | None,
) -> tuple[list[ModelReport], HeadReport | None, MemoryReport]:
    # all models stay loaded until the free memory has been measured
    models: list[LanguageModel] = []
    for source, its_options in sources:
        models.append(_load(source, its_options, models))
    measured = [_measured(report, model) for report, model in zip(reports, models, strict=True)]
    if head is not None:
        loaded = attach_head(head.name, models[0], options.revision, head_format=head_format(sources[0][0], options))
        head = replace(head, measured=measured_costs(loaded, models[0]))
    return measured, head, memory_report(measured, options, process_bytes, is_loaded=True, head=head)


def _load(source: Source, options: LoadOptions, before: list[LanguageModel]) -> LanguageModel:
    """Load the target, or, if `before` holds it, its draft model."""
    name = os.fspath(source)
    if before and is_decoder_draft(name, options.revision):
        return load_decoder_draft(name, before[0], options.revision)
    return load_model(source, options)


def _measured(report: ModelReport, model: LanguageModel) -> ModelReport:
    return replace(
        report,
        dtype=str(model.hf.dtype).removeprefix("torch."),
        context_len=model.traits.context_len,
        logit_width=model.traits.vocab_size,
        measured=Costs(weight_bytes(model.hf), model.traits.bytes_per_token),
        row_exact=model.traits.row_exact,
    )
