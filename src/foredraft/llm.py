"""Text in, text out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.cache import MemoryPool
from foredraft.drafters import REGISTRY, SELF_DRAFTS, DrafterContext, build
from foredraft.engine import Engine
from foredraft.errors import ForedraftError, ModelError, RequestError, VocabularyError
from foredraft.model import (
    EMBEDDED,
    LanguageModel,
    LoadOptions,
    available_memory,
    check_vocabulary,
    load_model,
    load_tokenizer,
)
from foredraft.outputs import Delta, RequestOutput
from foredraft.proposal import Drafter
from foredraft.request import Frontend, Prompt, Request
from foredraft.sampling import SamplingParams
from foredraft.scheduler import Limits
from foredraft.text import render_chat

logger = logging.getLogger("foredraft")

ModelSource: TypeAlias = str | os.PathLike[str] | PreTrainedModel
Messages = Sequence[Mapping[str, Any]]
_CACHE_SHARE = 0.5
_UNKNOWN_MEMORY = 4 * 2**30
_MOST_PADDING = 512


class LLM:
    """A target, what drafts for it, and an engine over both. Not thread-safe; AsyncLLM owns one in a thread.

    model: hub id, directory, or a loaded transformers model; None loads the embedded pair.
    draft_model: the same for the draft. It must speak the target's vocabulary.
    method: the drafter, one of "none", "ngram", "suffix", "draft_model", "self-int8" (the target's own int8 copy), or any
        object with propose and forget. None: "draft_model" where one is given, else "suffix".
    speculative_tokens: γ, draft tokens per step unless a request says otherwise.
    tokenizer: where the model's own directory has none, or the model is an object.
    dtype, device, revision, trust_remote_code: as in transformers; they hold for both models.
    quantization: "int8" rounds the linear layers to eight bits as they are loaded; None leaves them.
    draft_quantization: the same for the draft; None does as for the target, "none" leaves it. What the draft loses
        costs acceptance, never exactness.
    seed: of unseeded requests' noise. num_threads: of PyTorch's CPU kernels (they are the process's).
    cache_memory: bytes for keys and values, drafts' included; None takes what max_num_seqs full contexts need, at most
        half of the free memory.
    max_num_seqs, max_num_batched_tokens: sequences at a time, and rows of one pass.
    enable_prefix_caching: keep finished texts' keys and values for prompts that begin like them.

    Raises ForedraftError (a ValueError), one line, for a model, a pair or a setting that cannot work.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        draft_model: ModelSource | None = None,
        *,
        method: str | Drafter | None = None,
        speculative_tokens: int = 4,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        draft_quantization: str | None = None,
        seed: int | None = None,
        num_threads: int | None = None,
        cache_memory: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
    ) -> None:
        _check_numbers(
            speculative_tokens=(speculative_tokens, 0),
            max_num_seqs=(max_num_seqs, 1),
            max_num_batched_tokens=(max_num_batched_tokens, 1),
            num_threads=(num_threads, 1),
            cache_memory=(cache_memory, 1),
            seed=(seed, 0),
        )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if model is None:
            model = EMBEDDED / "target"
            if draft_model is None and method in (None, "draft_model"):
                draft_model = EMBEDDED / "draft"
        method = choose_method(method, draft_model)
        options = LoadOptions(dtype, device, revision, trust_remote_code, quantization)
        draft_options = replace(options, quantization=draft_quantization or quantization)
        self.target = load_model(model, options)
        self.tokenizer = _tokenizer(model, tokenizer, options)
        if isinstance(method, str) and method in SELF_DRAFTS:
            draft_model, draft_options = model, replace(options, **SELF_DRAFTS[method])
        self.draft = (
            None if draft_model is None else _load_draft(self.target, self.tokenizer, draft_model, draft_options)
        )
        for source, ours in ((model, self.target), (draft_model, self.draft)):
            if ours is not None and not isinstance(source, PreTrainedModel):
                ours.take_over()
        self.options, self.draft_options = options, draft_options
        self._source = model
        self._drafts = {} if self.draft is None else {_kind_of_draft(method): self.draft}
        self._limits = Limits(max_num_seqs, max_num_batched_tokens)
        self._seed, self._retain = seed, enable_prefix_caching
        self._start_engine(
            method, speculative_tokens, *equip(self.target, self.draft, method, self._limits, cache_memory)
        )

    def with_drafter(self, method: str | Drafter | None = None, speculative_tokens: int | None = None) -> LLM:
        """A second LLM with another drafter and an engine of its own, over the same models, tokenizer and cache memory.

        None takes this one's own. Nothing is loaded twice; only a copy of the target as a draft ("self-int8") is loaded
        the first time it is asked for. Run one of them at a time: they share the models.

        Raises ForedraftError for a method that does not exist, or that needs a draft model where there is none.
        """
        method = self._method if method is None else method
        kind = _kind_of_draft(method)
        method = choose_method(method, None if kind in SELF_DRAFTS else self._drafts.get(kind))
        if kind in SELF_DRAFTS and kind not in self._drafts:
            self._drafts[kind] = self._self_draft(kind)
        other = copy(self)
        other.draft = self._drafts.get(kind)
        wanted = self.speculative_tokens if speculative_tokens is None else speculative_tokens
        _check_numbers(speculative_tokens=(wanted, 0))
        drafter, pool = equip(self.target, other.draft, method, self._limits, pool=self.engine.pool)
        other._start_engine(method, wanted, drafter, pool)
        return other

    def _self_draft(self, method: str) -> LanguageModel:
        options = replace(self.options, **SELF_DRAFTS[method])
        draft = _load_draft(self.target, self.tokenizer, self._source, options)
        if not isinstance(self._source, PreTrainedModel):
            draft.take_over()
        return draft

    def _start_engine(self, method: str | Drafter, speculative_tokens: int, drafter: Drafter, pool: MemoryPool) -> None:
        self._method = method
        self.method = method if isinstance(method, str) else type(method).__name__
        self.speculative_tokens = speculative_tokens
        self.engine = Engine(
            self.target,
            drafter,
            pool,
            end_ids=_end_ids(self.target, self.tokenizer),
            speculative_tokens=speculative_tokens,
            limits=self._limits,
            seed=self._seed,
            retain=self._retain,
        )
        self.frontend = Frontend(self.engine, self.tokenizer, _sampling_defaults(self.target))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched; outputs in the order of the prompts.

        prompts: a string, strings, a list of token ids, or lists of them. sampling_params: one for all, or one each.
        progress: called with (finished, all) whenever a prompt finishes.

        Raises ForedraftError before anything runs if a prompt or its parameters cannot be honoured, and RequestError
        after all others are complete (its `outputs` has them) if one failed on the way.
        """
        batch = _as_batch(prompts)
        requests = self._prepare(batch, _one_each(sampling_params, len(batch)))
        return self._run(requests, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; messages are {"role": ..., "content": ...} as for the chat template."""
        return self.generate(
            [
                self.chat_prompt(
                    m, chat_template=chat_template, add_generation_prompt=add_generation_prompt, **template_args
                )
                for m in _as_conversations(messages)
            ],
            sampling_params,
        )

    def chat_prompt(self, messages: Messages, **template_args: Any) -> list[int]:
        """The token ids of a conversation under the model's chat template, without a doubled BOS."""
        if self.tokenizer is None:
            raise ForedraftError("a conversation needs a tokenizer with a chat template: give tokenizer=")
        return render_chat(self.tokenizer, messages, **template_args)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """The same for one prompt, as it is written. Stop reading at any moment: the request ends with the iterator.

        Other requests of the engine advance meanwhile. Raises as generate does.
        """
        (request,) = self._prepare([prompt], [sampling_params])
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        self.frontend.start(request)
        try:
            while not request.is_finished:
                self.engine.step()
                yield from request.deltas()
            if request.error:
                raise RequestError(f"request {request.request_id}: {request.error}", [request.output()])
            yield from request.deltas()
        finally:
            self.frontend.abort(request)

    def _prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None]) -> list[Request]:
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.frontend.prepare(prompt, one))
            except ForedraftError as error:
                raise type(error)(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from error
        return requests

    def _run(self, requests: list[Request], progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        num_finished = 0
        try:
            for request in requests:
                self.frontend.start(request)
            while not all(request.is_finished for request in requests):
                self.engine.step()
                finished = sum(request.is_finished for request in requests)
                if progress is not None and finished != num_finished:
                    progress(finished, len(requests))
                num_finished = finished
        finally:
            # on Ctrl-C, or whatever else ends the loop early, nothing is left behind
            for request in requests:
                self.frontend.abort(request)
        outputs = [request.output() for request in requests]
        failed = next((request for request in requests if request.error), None)
        if failed is not None:
            raise RequestError(f"request {failed.request_id}: {failed.error}", list(outputs))
        return outputs


def _check_numbers(**settings: tuple[int | None, int]) -> None:
    for name, (value, least) in settings.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ForedraftError(f"{name} must be an integer of at least {least}, not {value!r}")


def _kind_of_draft(method: str | Drafter) -> str:
    """Which of an LLM's draft models a method drafts with: a copy of the target, or the one it was given."""
    return method if isinstance(method, str) and method in SELF_DRAFTS else "draft_model"


def choose_method(method: str | Drafter | None, draft_model: ModelSource | LanguageModel | None) -> str | Drafter:
    """The drafter's name, or the drafter itself. Raises ForedraftError for a name that is none."""
    if method is None:
        return "suffix" if draft_model is None else "draft_model"
    if isinstance(method, str) and method not in REGISTRY:
        raise ForedraftError(f"unknown method {method!r}: known are {', '.join(sorted(REGISTRY))}")
    if method == "draft_model" and draft_model is None:
        raise ForedraftError('method "draft_model" needs a draft model: give draft_model=')
    if method in SELF_DRAFTS and draft_model is not None:
        raise ForedraftError(f'method "{method}" makes its draft from the target: leave draft_model out')
    return method


def _tokenizer(
    model: ModelSource, tokenizer: str | PreTrainedTokenizerBase | None, options: LoadOptions
) -> PreTrainedTokenizerBase | None:
    """The one given; else the checkpoint's own. A model in memory may do without."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is not None:
        return load_tokenizer(tokenizer, options)
    if isinstance(model, PreTrainedModel):
        return None
    try:
        return load_tokenizer(model, options)
    except ModelError as error:
        logger.warning("%s", error)
        return None


def _load_draft(
    target: LanguageModel, tokenizer: PreTrainedTokenizerBase | None, source: ModelSource, options: LoadOptions
) -> LanguageModel:
    """Vocabularies are compared, where there are two tokenizers before the weights are loaded."""
    if tokenizer is None or isinstance(source, PreTrainedModel):
        return draft_beside(target, load_model(source, options))
    check_vocabulary(tokenizer, load_tokenizer(source, options))
    return load_model(source, options)


def draft_beside(target: LanguageModel, draft: LanguageModel) -> LanguageModel:
    """The draft itself, where there are no tokenizers to compare. Raises VocabularyError for a logit width that padding
    cannot explain."""
    if abs(draft.traits.vocab_size - target.traits.vocab_size) > _MOST_PADDING:
        raise VocabularyError(
            f"the draft model's logits are {draft.traits.vocab_size} wide and the target's {target.traits.vocab_size}: "
            "use a draft with the target's vocabulary"
        )
    return draft


def _end_ids(model: LanguageModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Every end-of-sequence id that the checkpoint knows: generation_config's list, the configuration's, or the
    tokenizer's."""
    config = getattr(model.hf, "generation_config", None)
    for owner in (config, model.hf.config.get_text_config(), tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def _sampling_defaults(model: LanguageModel) -> dict[str, Any]:
    config = getattr(model.hf, "generation_config", None)
    return {} if config is None else config.to_diff_dict()


def equip(
    target: LanguageModel,
    draft: LanguageModel | None,
    method: str | Drafter,
    limits: Limits,
    cache_memory: int | None = None,
    pool: MemoryPool | None = None,
) -> tuple[Drafter, MemoryPool]:
    """What an engine needs beside its target: the drafter, and the memory that both share, `pool` if there is one.

    cache_memory: bytes; None takes what max_num_seqs full contexts need, at most half of the free memory.
    """
    if pool is None:
        per_token = target.traits.bytes_per_token + (draft.traits.bytes_per_token if draft else 0)
        wanted = per_token * target.traits.context_len * limits.max_num_seqs
        pool = MemoryPool(cache_memory or _default_cache(wanted, target.device))
    context = DrafterContext(target.traits.vocab_size, pool, draft, limits.max_batch_tokens)
    return build(method, context) if isinstance(method, str) else method, pool


def _default_cache(wanted: int, device: torch.device) -> int:
    """Bytes for keys and values: what is wanted, but at most half of the memory that is free."""
    free = available_memory(device)
    return max(1, min(wanted, int(_CACHE_SHARE * free) if free else _UNKNOWN_MEMORY))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if messages and all(isinstance(m, Mapping) for m in messages):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise ForedraftError(f"sampling_params must be one SamplingParams, or one for each of the {count} prompts")
    return list(params)
