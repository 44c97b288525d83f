"""Speculative decoding for transformers models in memory, through their `generate` method.

`generate` prepares everything (logits processors, stopping criteria, defaults) and passes it to the `custom_generate`
callable, so each row is sampled exactly as `generate` would sample it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from foredraft.engine.draft_sources import DraftSources
from foredraft.engine.engine import Engine
from foredraft.engine.hybrids import hybrid_of, with_hybrid
from foredraft.engine.methods import (
    EARLY_EXIT,
    HEAD_METHODS,
    OWN_DRAFTS,
    Methods,
    check_exit_layer,
    choose_methods,
    names_of,
)
from foredraft.engine.models import check_can_have_head, check_encoders, check_logit_width
from foredraft.engine.run import run_steps
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import StopRule, TokenSequence
from foredraft.engine.sources import NO_SOURCE, TokenSource
from foredraft.errors import ForedraftError, RequestError
from foredraft.heads import EarlyExit
from foredraft.model import LanguageModel, LoadOptions, ModelInputs, load_model
from foredraft.policy import Controller
from foredraft.sampling import AUTO, LogitsProcessor, SamplingParams
from foredraft.utils.arguments import check_numbers
from foredraft.vocabulary import VocabularyPair, pair_of

_UNSUPPORTED_MODES = ("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "force_words_ids", "constraints")


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    *,
    draft_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Tensor:
    """Run `model.generate(...)` with batched speculative decoding. -> ids [B, L + new], as from generate

    inputs: ids [B, L], or the output of a tokenizer, which may also be given as keyword arguments (input_ids, attention_mask); for an
    encoder-decoder, the encoder's inputs. tokenizer: the model's, needed for stop_strings; with assistant_tokenizer (the draft
    model's), also for a draft model with another vocabulary. settings: any argument of generate (max_new_tokens, do_sample, ...), and
    method, exit_layer, speculative_tokens and seed of custom_generate.

    Raises ForedraftError if there are no inputs, and for settings that cannot be honoured.
    """
    for name, instead in (("streamer", "use LLM.stream"), ("assistant_model", "give draft_model (--draft-model)")):
        if settings.get(name) is not None:
            raise ForedraftError(f"{name} is not passed on to custom_generate: {instead}")
    settings |= _stop_strings_as_criteria(model, tokenizer, settings)
    settings |= {"vocabularies": _vocabularies(tokenizer, assistant_tokenizer)}
    tensors = _tensors_of(inputs, settings)
    if model.config.is_encoder_decoder:
        settings["sources"] = _sources_of(tensors)  # generate passes only its own encoder's outputs to custom_generate
    out: Tensor = model.generate(**tensors, custom_generate=custom_generate, draft_model=draft_model, **settings)
    return out


def _tensors_of(inputs: Tensor | Mapping[str, Tensor] | None, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The inputs by name; those given as keyword arguments are taken out of the settings."""
    tensors: dict[str, Tensor] = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors |= {name: settings.pop(name) for name in ("input_ids", "attention_mask") if name in settings}
    if inputs is None and tensors.get("input_ids") is None:
        raise ForedraftError("there are no inputs: give ids, the output of a tokenizer, or input_ids=")
    if inputs is not None and not isinstance(inputs, Mapping):
        tensors["inputs"] = inputs
    return tensors


def _vocabularies(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> VocabularyPair | None:
    if assistant_tokenizer is None:
        return None
    if tokenizer is None:
        raise ForedraftError("assistant_tokenizer is compared with the model's tokenizer: give tokenizer= too")
    return pair_of(tokenizer, assistant_tokenizer)


def _sources_of(tensors: Mapping[str, Tensor]) -> list[list[int]]:
    """The source ids of each row, without padding. tensors: the inputs of an encoder-decoder."""
    ids = tensors.get("inputs", tensors.get("input_ids"))
    if ids is None:
        raise ForedraftError("an encoder-decoder reads only token ids here: give input_ids (LLM takes input_features)")
    return _unpadded(ids, tensors.get("attention_mask"))


def _stop_strings_as_criteria(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace stop_strings by a criterion, since generate does not pass the tokenizer to custom_generate."""
    configs = (settings.get("generation_config"), model.generation_config)
    candidates = [settings.get("stop_strings"), *(getattr(config, "stop_strings", None) for config in configs)]
    strings = next((strings for strings in candidates if strings is not None), None)
    if settings.get("token_healing") or any(getattr(config, "token_healing", False) for config in configs):
        raise ForedraftError(
            "token_healing is not supported: heal the prompt first (model.heal_tokens), and leave the setting out"
        )
    if strings is None:
        return {}
    if tokenizer is None:
        raise ForedraftError("stop_strings need the model's tokenizer: give tokenizer=")
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    return {"stop_strings": None, "stopping_criteria": [*(settings.get("stopping_criteria") or ()), criterion]}


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft_model: PreTrainedModel | None = None,
    method: Methods | None = None,
    exit_layer: int | None = None,
    speculative_tokens: int | str = 4,
    seed: int | None = None,
    vocabularies: VocabularyPair | None = None,
    sources: Sequence[Sequence[int]] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """For `model.generate(**inputs, custom_generate=foredraft.custom_generate, draft_model=draft)`.
    -> ids [B, L + new], padded on the right as by generate

    method, exit_layer: as for LLM. speculative_tokens: a number, which the first method drafts, or "auto", which measures what is
    fastest; then the number of draft tokens, and so a text sampled without a seed, depends on measured times. seed: sampled text
    depends on model, prompt and settings alone; rows with the same prompt get different noise. Without a seed the noise comes from
    PyTorch's generator, so torch.manual_seed applies. vocabularies: of both models if they differ (foredraft.vocabulary.pair_of).
    sources: the encoder's token ids for each row of the batch, without padding. generate passes neither sources nor a tokenizer: for
    an encoder-decoder, and for stop_strings, call `foredraft.generate` (or give a StopStringCriteria).

    Raises ForedraftError for settings that cannot be honoured.
    """
    config = generation_config or model.generation_config
    _refuse(config, model_kwargs)
    if draft_model is not None and not isinstance(draft_model, PreTrainedModel):
        raise ForedraftError(
            f"draft_model must be a transformers model, not {type(draft_model).__name__}: LLM takes directories, hub ids and heads"
        )
    with _evaluating([model] if draft_model is None else [model, draft_model]):
        inputs = _inputs_of(model, input_ids, sources, model_kwargs)
        is_auto = speculative_tokens == AUTO
        engine = _engine(model, draft_model, method, exit_layer, len(inputs), config, vocabularies, is_auto=is_auto)
        return _write(engine, inputs, input_ids, logits_processor, stopping_criteria, config, speculative_tokens, seed)


def _inputs_of(
    model: PreTrainedModel,
    input_ids: Tensor,
    sources: Sequence[Sequence[int]] | None,
    model_kwargs: Mapping[str, Any],
) -> list[ModelInputs]:
    """The inputs of each row. sources: as in custom_generate; if generate returns several texts for each, it has repeated each row."""
    if not model.config.is_encoder_decoder:
        return [ModelInputs(NO_SOURCE, prompt) for prompt in _unpadded(input_ids, model_kwargs.get("attention_mask"))]
    if not sources or len(input_ids) % len(sources):
        raise ForedraftError("an encoder-decoder needs its sources: call foredraft.generate(model, inputs)")
    prompts = _unpadded(input_ids, model_kwargs.get("decoder_attention_mask"))
    num_texts = len(prompts) // len(sources)
    return [ModelInputs(TokenSource(tuple(sources[row // num_texts])), prompt) for row, prompt in enumerate(prompts)]


def _write(
    engine: Engine,
    inputs: list[ModelInputs],
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    config: GenerationConfig,
    speculative_tokens: int | str,
    seed: int | None,
) -> Tensor:
    rows = []
    for index, own in enumerate(inputs):
        processors = [_row_processor(logits_processor, input_ids, index, len(own.tokens))] if logits_processor else []
        params = _params(config, input_ids.shape[1], processors, speculative_tokens, seed)
        stop_rule = _stop_rule(input_ids[index], stopping_criteria, config)
        rows.append(_Row(own, params, stop_rule, child=inputs[:index].count(own)))
    return _padded(input_ids, _run(engine, rows), config)


@dataclass(slots=True)
class _Row:
    """One row of generate's batch. child: distinguishes rows with the same inputs."""

    inputs: ModelInputs
    params: SamplingParams
    stop_rule: StopRule | None
    child: int
    sequence: TokenSequence | None = None

    @property
    def is_finished(self) -> bool:
        return self.sequence is None or self.sequence.is_finished


def _run(engine: Engine, rows: Sequence[_Row]) -> list[list[int]]:
    """-> the new ids of each row. Raises RequestError if a row failed, after the others are finished."""

    def submit(row: _Row) -> None:
        source, prompt = row.inputs
        row.sequence = engine.add(prompt, row.params, source=source, stop_rule=row.stop_rule, child=row.child)

    def abort(row: _Row) -> None:
        if row.sequence is not None:
            engine.abort(row.sequence)

    for _ in run_steps(engine, rows, submit=submit, abort=abort):
        pass
    sequences = [row.sequence for row in rows if row.sequence is not None]
    failed = next((sequence for sequence in sequences if sequence.error), None)
    if failed is not None:
        raise RequestError(str(failed.error)) from failed.failure
    return [sequence.output_ids for sequence in sequences]


@contextmanager
def _evaluating(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Put the models into evaluation mode, since dropout would break exactness, and restore their mode afterwards."""
    before = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, was_training in zip(models, before, strict=True):
            model.train(was_training)


def _refuse(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED_MODES:
        if getattr(config, name, None):
            raise ForedraftError(f"{name} selects another generation mode, which is not supported; leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ForedraftError("inputs_embeds cannot be used for drafting: give input_ids")
    if (config.num_beams or 1) > 1:
        raise ForedraftError(f"num_beams {config.num_beams}: beam search is not speculative sampling; use num_beams=1")
    if config.return_dict_in_generate:
        raise ForedraftError("return_dict_in_generate is not supported; use LLM for log-probabilities and metrics")
    if config.guidance_scale not in (None, 1, 1.0):
        raise ForedraftError("guidance_scale needs a second forward pass of the model; use guidance_scale=None")


def _unpadded(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if mask is None:
        return [row.tolist() for row in input_ids]
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _params(
    config: GenerationConfig,
    num_prompt: int,
    processors: list[LogitsProcessor],
    speculative_tokens: int | str,
    seed: int | None,
) -> SamplingParams:
    """The processors already do everything that generate does to the logits, so no other parameter is set."""
    params = SamplingParams(
        temperature=1.0 if config.do_sample else 0.0,
        max_tokens=config.max_new_tokens or (config.max_length or 20) - num_prompt,
        seed=seed if config.do_sample else None,
        logits_processors=processors,
        speculative_tokens=speculative_tokens,
    )
    return params.resolve({})


def _row_processor(processors: LogitsProcessorList, input_ids: Tensor, row: int, num_prompt: int) -> LogitsProcessor:
    """Apply generate's processors to one row of its batch. Some of them hold a value per row or count the padding, so they get a
    batch of the same size and padding, of which only this row is used."""
    padded = input_ids[row].tolist()

    def process(prefix: list[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([[*padded, *prefix[num_prompt:]]], device=logits.device)
        num_rows = input_ids.shape[0]
        out: Tensor = processors(ids.repeat(num_rows, 1), logits[None].float().repeat(num_rows, 1))
        return out[row]

    return process


def _stop_rule(prompt_row: Tensor, criteria: StoppingCriteriaList | None, config: GenerationConfig) -> StopRule | None:
    """A rule that evaluates the criteria the engine does not apply itself, after every token, on the row as generate pads it."""
    others = StoppingCriteriaList([c for c in criteria or () if not _is_built_in(c, config)])
    if not others:
        return None
    ids = prompt_row.tolist()

    def rule(new_ids: Sequence[int], num_output_before: int) -> int | None:
        for index, token in enumerate(new_ids):
            ids.append(token)
            row = torch.tensor([ids], device=prompt_row.device)
            if bool(others(row, None)[0]):
                return index + 1
        return None

    return rule


def _is_built_in(criterion: Any, config: GenerationConfig) -> bool:
    """Whether a criterion is generate's own for length or end of sequence. A user's criterion may have other values."""
    if isinstance(criterion, MaxLengthCriteria):
        return bool(criterion.max_length == config.max_length)
    return isinstance(criterion, EosTokenCriteria) and set(_as_ids(criterion.eos_token_id)) == set(
        _as_ids(config.eos_token_id)
    )


def _engine(
    model: PreTrainedModel,
    draft_model: PreTrainedModel | None,
    method: Methods | None,
    exit_layer: int | None,
    num_rows: int,
    config: GenerationConfig,
    vocabularies: VocabularyPair | None,
    *,
    is_auto: bool,
) -> Engine:
    check_numbers(exit_layer=(exit_layer, 1))
    _check_methods(method)
    has_exit_layer = exit_layer is not None
    methods = choose_methods(method, has_draft_model=draft_model is not None, has_exit_layer=has_exit_layer)
    check_exit_layer(exit_layer, names_of(methods), "draft_model")
    target = _language_model(model)
    if has_exit_layer:
        check_can_have_head(target)
    head = None if exit_layer is None else EarlyExit.after(target, exit_layer)
    drafts = {} if draft_model is None else {"draft_model": _language_model(draft_model)}
    for draft in drafts.values():
        if vocabularies is None:
            check_logit_width(target, draft)
        check_encoders(target, draft, vocabularies)
    pairs = {} if vocabularies is None else {"draft_model": vocabularies}
    limits = Limits(max_num_seqs=num_rows)  # cache memory for these rows alone
    sources = DraftSources(target, drafts, head, pairs)
    pool = sources.new_pool(methods, limits)
    drafters = sources.drafters(methods, limits, pool)
    if is_auto:
        drafters = with_hybrid(drafters)
    return Engine(
        target,
        drafters,
        pool,
        policy=Controller(list(drafters), hybrid=hybrid_of(drafters)),
        end_ids=_as_ids(config.eos_token_id),
        seed=int(torch.randint(2**62, ()).item()),
        retain=False,
    )


def _check_methods(method: Methods | None) -> None:
    """Refuse methods that need a head or a copy of the target, which are loaded from files."""
    for name in names_of(method) if method is not None else ():
        if name in OWN_DRAFTS | (HEAD_METHODS - {EARLY_EXIT}):
            raise ForedraftError(
                f'method "{name}" is for LLM, which loads what it needs: use LLM(..., method="{name}")'
            )


def _language_model(model: PreTrainedModel) -> LanguageModel:
    """The model with its traits, which are cached on the model until its dtype, device or vocabulary changes."""
    key = (model.dtype, model.device, model.get_input_embeddings().weight.shape[0])
    cached = getattr(model, "_foredraft_traits", None)
    if cached is not None and cached[0] == key:
        return LanguageModel(model, cached[1])
    loaded = load_model(model, LoadOptions())
    model._foredraft_traits = (key, loaded.traits)
    return loaded


def _as_ids(ids: int | list[int] | Tensor | None) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, Tensor):
        return [int(i) for i in ids.flatten().tolist()]
    return [ids] if isinstance(ids, int) else list(ids)


def _padded(input_ids: Tensor, outputs: list[list[int]], config: GenerationConfig) -> Tensor:
    width = max(len(output) for output in outputs)
    fill = (_as_ids(config.pad_token_id) or _as_ids(config.eos_token_id) or [0])[0]
    rows = [[*output, *[fill] * (width - len(output))] for output in outputs]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
