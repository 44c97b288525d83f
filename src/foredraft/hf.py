"""Speculation on models already in memory, through transformers' own door.

`generate` of transformers prepares everything (its processors, its stopping criteria, its defaults) and hands it to a
callable; what is sampled here is therefore exactly what `generate` was asked for, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from foredraft.engine.build import build_drafters
from foredraft.engine.engine import Engine
from foredraft.engine.methods import Methods, choose_methods
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import StopRule, TokenSequence
from foredraft.errors import ForedraftError, RequestError
from foredraft.llm import draft_beside
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.policy import Controller
from foredraft.sampling import LogitsProcessor, SamplingParams

_OTHER_MODES = ("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "force_words_ids", "constraints")


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Tensor],
    *,
    draft_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Tensor:
    """`model.generate(...)`, speculatively and batched. inputs: ids [B, L], or what a tokenizer returned.

    tokenizer: for stop_strings. settings: whatever generate takes (max_new_tokens, do_sample, ...), and custom_generate's
    own method, speculative_tokens and seed. -> ids [B, L + new], as from generate.

    Raises ForedraftError for what cannot be honoured.
    """
    for name in ("streamer", "assistant_model"):
        if settings.get(name) is not None:
            raise ForedraftError(f"{name} does not reach custom_generate: use LLM.stream, or draft_model=")
    settings |= _stop_strings_as_criteria(model, tokenizer, settings)
    tensors = dict(inputs) if isinstance(inputs, Mapping) else {"inputs": inputs}
    out: Tensor = model.generate(**tensors, custom_generate=custom_generate, draft_model=draft_model, **settings)
    return out


def _stop_strings_as_criteria(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """generate keeps the tokenizer from a custom_generate, and then misses it: so its criterion is made here."""
    configs = (settings.get("generation_config"), model.generation_config)
    found = [settings.get("stop_strings"), *(getattr(config, "stop_strings", None) for config in configs)]
    strings = next((one for one in found if one is not None), None)
    if settings.get("token_healing") or any(getattr(config, "token_healing", False) for config in configs):
        raise ForedraftError("token_healing: heal the prompt first (model.heal_tokens), and leave the setting out")
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
    speculative_tokens: int | str = 4,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """For `model.generate(**inputs, custom_generate=foredraft.custom_generate, draft_model=draft)`. generate hands it no
    tokenizer, so stop_strings go through `foredraft.generate`, or as a StopStringCriteria.

    method: as for LLM. speculative_tokens: a number, or "auto", which measures what pays; then the clock has a say in how many
    tokens are drafted, and so in what is drawn without a seed. seed: makes sampled text depend on model, prompt and settings alone; rows with the same prompt
    get different noise. Without one, the noise comes from PyTorch's own generator, so torch.manual_seed holds.
    -> ids [B, L + new], padded on the right like generate's. Raises ForedraftError for what cannot be honoured.
    """
    config = generation_config or model.generation_config
    _refuse(config, model_kwargs)
    with _evaluating([model] if draft_model is None else [model, draft_model]):
        prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
        engine = _engine(model, draft_model, method, len(prompts), config)
        return _write(engine, prompts, input_ids, logits_processor, stopping_criteria, config, speculative_tokens, seed)


def _write(
    engine: Engine,
    prompts: list[list[int]],
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    config: GenerationConfig,
    speculative_tokens: int | str,
    seed: int | None,
) -> Tensor:
    sequences: list[TokenSequence] = []
    try:
        for row, prompt in enumerate(prompts):
            processors = [_row_processor(logits_processor, input_ids, row, len(prompt))] if logits_processor else []
            params = _params(config, input_ids.shape[1], processors, speculative_tokens, seed)
            rule = _stop_rule(input_ids[row], stopping_criteria, config)
            sequences.append(engine.add(prompt, params, stop_rule=rule, child=prompts[:row].count(prompt)))
        while engine.has_work:
            engine.step()
    finally:
        for sequence in sequences:
            engine.abort(sequence)
    failed = next((sequence for sequence in sequences if sequence.error), None)
    if failed is not None:
        raise RequestError(str(failed.error)) from failed.failure
    return _padded(input_ids, [sequence.output_ids for sequence in sequences], config)


@contextmanager
def _evaluating(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Dropout would make every row its own; afterwards the models are as their owner left them."""
    before = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, was_training in zip(models, before, strict=True):
            model.train(was_training)


def _refuse(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    for name in _OTHER_MODES:
        if getattr(config, name, None):
            raise ForedraftError(f"{name} is another way of generating, which this one cannot honour; leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ForedraftError("inputs_embeds cannot be drafted from: give input_ids")
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
    """Processors hold everything that generate would do to the logits, so nothing else is set here."""
    params = SamplingParams(
        temperature=1.0 if config.do_sample else 0.0,
        max_tokens=config.max_new_tokens or (config.max_length or 20) - num_prompt,
        seed=seed if config.do_sample else None,
        logits_processors=processors,
        speculative_tokens=speculative_tokens,
    )
    return params.resolve({})


def _row_processor(processors: LogitsProcessorList, input_ids: Tensor, row: int, num_prompt: int) -> LogitsProcessor:
    """generate's processors for one row of its batch. Some hold one value per row, and count the padding: so they are
    shown a batch of the same size and padding, of which only this row is read."""
    padded = input_ids[row].tolist()

    def process(prefix: list[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([[*padded, *prefix[num_prompt:]]], device=logits.device)
        num_rows = input_ids.shape[0]
        out: Tensor = processors(ids.repeat(num_rows, 1), logits[None].float().repeat(num_rows, 1))
        return out[row]

    return process


def _stop_rule(prompt_row: Tensor, criteria: StoppingCriteriaList | None, config: GenerationConfig) -> StopRule | None:
    """Criteria that the engine does not keep by itself, asked after every token, on the row as generate pads it."""
    others = StoppingCriteriaList([c for c in criteria or () if not _is_kept_anyway(c, config)])
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


def _is_kept_anyway(criterion: Any, config: GenerationConfig) -> bool:
    """generate's own criteria for length and end of sequence; the user's may say something else."""
    if isinstance(criterion, MaxLengthCriteria):
        return bool(criterion.max_length == config.max_length)
    return isinstance(criterion, EosTokenCriteria) and set(_as_ids(criterion.eos_token_id)) == set(
        _as_ids(config.eos_token_id)
    )


def _engine(
    model: PreTrainedModel,
    draft_model: PreTrainedModel | None,
    method: Methods | None,
    num_rows: int,
    config: GenerationConfig,
) -> Engine:
    methods = choose_methods(method, has_draft_model=draft_model is not None)
    target = _known(model)
    drafts = {} if draft_model is None else {"draft_model": draft_beside(target, _known(draft_model))}
    # memory for no more sequences than there are
    drafters, pool = build_drafters(target, drafts, methods, Limits(max_num_seqs=num_rows))
    return Engine(
        target,
        drafters,
        pool,
        policy=Controller(list(drafters)),
        end_ids=_as_ids(config.eos_token_id),
        seed=int(torch.randint(2**62, ()).item()),
        retain=False,
    )


def _known(model: PreTrainedModel) -> LanguageModel:
    """What loading finds out is kept on the model itself, as long as it stays where and what it is."""
    key = (model.dtype, model.device, model.get_input_embeddings().weight.shape[0])
    found = getattr(model, "_foredraft_traits", None)
    if found is not None and found[0] == key:
        return LanguageModel(model, found[1])
    known = load_model(model, LoadOptions())
    model._foredraft_traits = (key, known.traits)
    return known


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
