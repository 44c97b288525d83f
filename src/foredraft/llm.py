"""Text in, text out."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.drafters import SELF_DRAFTS
from foredraft.engine.build import build_drafters
from foredraft.engine.cache import MemoryPool
from foredraft.engine.engine import Engine
from foredraft.engine.methods import NO_DRAFT, Method, Methods, choose_methods, draft_of, name_of, names_of
from foredraft.engine.proposal import Drafter
from foredraft.engine.scheduler import Limits
from foredraft.errors import ForedraftError, ModelError, VocabularyError
from foredraft.model import (
    EMBEDDED,
    LanguageModel,
    LoadOptions,
    WarmUpSizes,
    check_vocabulary,
    examine,
    load_model,
    load_tokenizer,
)
from foredraft.policy import Controller, CostFile, FixedPolicy, Guard, Policy
from foredraft.sampling import AUTO, SamplingParams
from foredraft.settings import Settings
from foredraft.text.grammar import Grammars
from foredraft.text.outputs import Delta, RequestOutput
from foredraft.text.request import Frontend, Prompt, Request
from foredraft.text.text import render_chat
from foredraft.utils.arguments import check_draft_len, check_numbers, check_threads, check_thresholds
from foredraft.utils.machine import this_machine
from foredraft.verify import Rule, Verifier, checked_rules, verify

logger = logging.getLogger("foredraft")

ModelSource: TypeAlias = str | os.PathLike[str] | PreTrainedModel
Messages = Sequence[Mapping[str, Any]]
_MOST_PADDING = 512
MAX_SPECULATIVE_TOKENS = 8


class LLM:
    """A target, what drafts for it, and an engine over both. Not thread-safe; AsyncLLM owns one in a thread.

    model: hub id, directory, or a loaded transformers model; None loads the embedded pair.
    draft_model: the same for the draft. It must speak the target's vocabulary.
    method: the drafter, one of "none", "ngram", "suffix", "draft_model", "self-int8" (the target's own int8 copy), or any
        object with propose and forget; or a list of them (or names with "+" between them), to choose from step by step. None: "draft_model" where one is
        given, else "suffix".
    speculative_tokens: γ, draft tokens per step unless a request says otherwise. "auto" measures what drafting costs and
        brings, and takes what pays, down to nothing; a number asks the first drafter for that many. None: "auto".
    max_speculative_tokens: the most that "auto" asks for; None: 8.
    min_acceptance_rate, max_draft_memory: a drafter of whose recent draft tokens a smaller share stood, or that holds more
        bytes of the cache memory, is left alone for a while; a warning says so, and `crossings` counts it. None: no limit.
    tokenizer: where the model's own directory has none, or the model is an object.
    dtype, device, revision, trust_remote_code: as in transformers; they hold for both models.
    quantization: "int8" rounds the linear layers to eight bits as they are loaded; None leaves them.
    draft_quantization: the same for the draft; None does as for the target, "none" leaves it. What the draft loses
        costs acceptance, never exactness.
    batch_invariant: on a GPU, products whose rows do not see each other in place of the library's, so that a greedy or seeded
        text is the same with any draft and in any company (see docs/internals/gpu.md). On a CPU it changes nothing.
    seed: of unseeded requests' noise; they repeat themselves only where speculative_tokens is a number, since "auto" goes by
        the clock (SamplingParams.seed holds in any case). num_threads: of PyTorch's CPU kernels (they are the process's).
    cache_memory: bytes for keys and values, drafts' included; None takes what max_num_seqs full contexts need, at most
        half of the free memory.
    max_num_seqs, max_num_batched_tokens: sequences at a time, and rows of one pass.
    enable_prefix_caching: keep ended texts' keys and values for prompts that begin like them, until the room is needed;
        SamplingParams.prefix_caching says it for one request.
    verification_rules: rules of one's own, by the names that SamplingParams.verification then knows (see
        docs/guides/adding-a-verification-rule.md).
    config: a TOML file with some of these settings, as `foredraft tune` writes it; what is given here wins over it.

    Raises ForedraftError (a ValueError), one line, for a model, a pair or a setting that cannot work.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        draft_model: ModelSource | None = None,
        *,
        method: Methods | None = None,
        speculative_tokens: int | str | None = None,
        max_speculative_tokens: int | None = None,
        min_acceptance_rate: float | None = None,
        max_draft_memory: int | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        draft_quantization: str | None = None,
        batch_invariant: bool = False,
        seed: int | None = None,
        num_threads: int | None = None,
        cache_memory: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        verification_rules: Mapping[str, Rule] | None = None,
        config: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = (Settings() if config is None else Settings.read(config)).under(
            model=model,
            draft_model=draft_model,
            method=method,
            speculative_tokens=speculative_tokens,
            max_speculative_tokens=max_speculative_tokens,
            quantization=quantization,
            draft_quantization=draft_quantization,
            num_threads=num_threads,
        )
        model, draft_model, method = settings.model, settings.draft_model, settings.method
        quantization, draft_quantization = settings.quantization, settings.draft_quantization
        num_threads = settings.num_threads
        speculative_tokens = AUTO if settings.speculative_tokens is None else settings.speculative_tokens
        max_speculative_tokens = settings.max_speculative_tokens
        if max_speculative_tokens is None:
            max_speculative_tokens = MAX_SPECULATIVE_TOKENS
        check_numbers(
            max_speculative_tokens=(max_speculative_tokens, 1),
            max_num_seqs=(max_num_seqs, 1),
            max_num_batched_tokens=(max_num_batched_tokens, 1),
            cache_memory=(cache_memory, 1),
            seed=(seed, 0),
        )
        check_threads(num_threads)
        check_draft_len(speculative_tokens)
        check_thresholds(min_acceptance_rate, max_draft_memory)
        self._rules = checked_rules(verification_rules or {})
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if model is None:
            model = EMBEDDED / "target"
            if draft_model is None and (method is None or "draft_model" in names_of(method)):
                draft_model = EMBEDDED / "draft"
        methods = choose_methods(method, has_draft_model=draft_model is not None)
        options = LoadOptions(dtype, device, revision, trust_remote_code, quantization, batch_invariant=batch_invariant)
        for source in (model, draft_model):  # a draft that cannot be used is told before the target is loaded
            if source is not None and not isinstance(source, PreTrainedModel):
                examine(source, options)
        self.target = load_model(model, options)
        self.tokenizer = _tokenizer(model, tokenizer, options)
        self.options = options
        self.draft_options = replace(options, quantization=draft_quantization or quantization)
        self._source = model
        self._drafts: dict[str, LanguageModel] = {}
        if draft_model is not None:
            self._drafts["draft_model"] = _load_draft(self.target, self.tokenizer, draft_model, self.draft_options)
        for source, ours in ((model, self.target), (draft_model, self._drafts.get("draft_model"))):
            if ours is not None and not isinstance(source, PreTrainedModel):
                ours.take_over()
        self._load_self_drafts(methods)
        self._limits = Limits(max_num_seqs, max_num_batched_tokens)
        self._max_speculative_tokens = max_speculative_tokens
        self._warm_up(speculative_tokens)
        self._thresholds: dict[str, Any] = {
            "min_acceptance_rate": min_acceptance_rate,
            "max_draft_memory": max_draft_memory,
        }
        self._seed, self._retain = seed, enable_prefix_caching
        self._grammars: Grammars | None = None  # one for all engines over this tokenizer
        self._start_engine(
            methods, speculative_tokens, *build_drafters(self.target, self._drafts, methods, self._limits, cache_memory)
        )

    def with_drafter(self, method: Methods | None = None, speculative_tokens: int | str | None = None) -> LLM:
        """A second LLM with other drafters and an engine of its own, over the same models, tokenizer and cache memory.

        None takes this one's own. Nothing is loaded twice; only a copy of the target as a draft ("self-int8") is loaded
        the first time it is asked for. They share the models: one step of one of them at a time.

        Raises ForedraftError for a method that does not exist, or that needs a draft model where there is none.
        """
        methods = self._methods
        if method is not None:
            only_own = isinstance(method, str) and method in SELF_DRAFTS  # then the draft model stays out of it
            methods = choose_methods(method, has_draft_model="draft_model" in self._drafts and not only_own)
        wanted = self.speculative_tokens if speculative_tokens is None else speculative_tokens
        check_draft_len(wanted)
        self._load_self_drafts(methods)
        other = copy(self)
        drafters, pool = build_drafters(self.target, self._drafts, methods, self._limits, pool=self.engine.pool)
        other._start_engine(methods, wanted, drafters, pool)
        return other

    def _warm_up(self, speculative_tokens: int | str) -> None:
        """What models make ready takes memory too: before the rest is measured out to keys and values."""
        fixed = speculative_tokens if isinstance(speculative_tokens, int) else 0
        depth = max(self._max_speculative_tokens, fixed)
        vocab_size, num_spans = self.target.traits.vocab_size, self._limits.max_num_seqs
        self.target.warm_up(WarmUpSizes(num_spans, depth + 1, vocab_size, drafts=False))
        for draft in self._drafts.values():
            draft.warm_up(WarmUpSizes(num_spans, depth, vocab_size, drafts=True))

    def _load_self_drafts(self, methods: Sequence[Method]) -> None:
        """The copies of the target that these methods draft with, unless they are there."""
        for method in methods:
            name = name_of(method)
            if name not in SELF_DRAFTS or name in self._drafts:
                continue
            draft = _load_draft(self.target, self.tokenizer, self._source, replace(self.options, **SELF_DRAFTS[name]))
            if not isinstance(self._source, PreTrainedModel):
                draft.take_over()
            self._drafts[name] = draft

    def _start_engine(
        self, methods: list[Method], speculative_tokens: int | str, drafters: dict[str, Drafter], pool: MemoryPool
    ) -> None:
        self._methods = methods
        self.method = "+".join(drafters)
        self.draft = self._drafts.get(draft_of(methods[0]))
        self.speculative_tokens = speculative_tokens
        self.policy = self._guarded(self._policy_for(list(drafters)), drafters)
        self._trial_policies: list[Policy] = []
        self.drafters = drafters
        self.engine = self._engine(self.target, drafters, pool, self.policy, seed=self._seed, retain=self._retain)
        self.frontend = Frontend(self.engine, self.tokenizer, _sampling_defaults(self.target), self._grammars)
        self._grammars = self.frontend.grammars

    def trial(
        self,
        drafters: Mapping[str, Drafter],
        *,
        target: LanguageModel | None = None,
        policy: Policy | None = None,
        seed: int | None = None,
        verifier: Verifier = verify,
    ) -> Frontend:
        """Another engine with the settings of this one, to try it without touching what it holds. Its keys and values
        have room beside those of the drafters, and are gone with it.

        drafters: in place of this one's. policy: None makes one like this one's, from the costs known so far; what it
        measures is not kept. target: None takes this one's.

        Raises ForedraftError while requests of this LLM run: they would share the drafters.
        """
        if self.engine.has_work:
            raise ForedraftError("requests of this LLM are running: finish or close them first")
        self.engine.drop_retained()
        policy = policy or self._policy_for(list(drafters), keeps_costs=False)
        self._trial_policies.append(policy)
        engine = self._engine(
            target or self.target,
            drafters,
            MemoryPool(self.engine.pool.free),
            policy,
            seed=seed,
            retain=False,
            verifier=verifier,
        )
        return Frontend(engine, self.tokenizer, _sampling_defaults(self.target), self._grammars)

    def _engine(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        pool: MemoryPool,
        policy: Policy,
        *,
        seed: int | None,
        retain: bool,
        verifier: Verifier = verify,
    ) -> Engine:
        return Engine(
            target,
            drafters,
            pool,
            end_ids=_end_ids(self.target, self.tokenizer),
            speculative_tokens=None if isinstance(self.speculative_tokens, str) else self.speculative_tokens,
            policy=policy,
            limits=self._limits,
            seed=seed,
            retain=retain,
            verifier=verifier,
            verification_rules=self._rules,
        )

    def _policy_for(self, drafters: list[str], *, keeps_costs: bool = True) -> Policy:
        """Who drafts nothing needs nobody to decide on it."""
        if drafters == [NO_DRAFT]:
            return FixedPolicy(NO_DRAFT)
        store = None if isinstance(self._source, PreTrainedModel) else CostFile.of(self._costs_of(drafters))
        return Controller(
            drafters,
            max_draft=self._max_speculative_tokens,
            costs=store.load() if store else None,
            store=store if keeps_costs else None,
        )

    def _guarded(self, policy: Policy, drafters: dict[str, Drafter]) -> Policy:
        if all(threshold is None for threshold in self._thresholds.values()):
            return policy
        return Guard(policy, drafters, **self._thresholds)

    @property
    def crossings(self) -> Counter[tuple[str, str]]:
        """How often a drafter crossed a threshold that was set, by drafter and threshold. Counts, to be added up."""
        return self.policy.crossings if isinstance(self.policy, Guard) else Counter()

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """How often a drafter was left alone that had drafted, by drafter and reason: a threshold that was set, "memory_short",
        "failed" or "does_not_pay"; in trials too. Counts, to be added up."""
        return sum((policy.fallbacks for policy in (self.policy, *self._trial_policies)), Counter())

    @property
    def max_num_seqs(self) -> int:
        """Texts that are written at a time."""
        return self._limits.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and text together."""
        return self.target.traits.context_len

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ForedraftError where there is none."""
        if self.tokenizer is None:
            raise ForedraftError("this model has no tokenizer: give token ids as the prompt, or tokenizer=")
        return self.tokenizer

    @property
    def cooldowns(self) -> dict[str, str]:
        """The drafters that are left alone now, and why: "memory_short", "failed", or a threshold."""
        return self.policy.cooldowns()

    def _costs_of(self, drafters: list[str]) -> dict[str, object]:
        """What the cost of a step depends on, text and load aside."""
        models = {"target": (self.target, self.options), "draft": (self.draft, self.draft_options)}
        return {
            "machine": asdict(this_machine()),
            "drafters": drafters,
            **{
                role: (model.traits, options, type(model.body).__name__)
                for role, (model, options) in models.items()
                if model is not None
            },
        }

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched; outputs in the order of the prompts.

        prompts: a string, strings, a list of token ids, or lists of them. sampling_params: one for all, or one each.
        progress: called with (finished, all) whenever a prompt finishes. priority: one each; the lower, the earlier it
        begins.

        Raises ForedraftError before anything runs if a prompt or its parameters cannot be honoured, and RequestError
        after all others are complete (its `outputs` has them) if one failed on the way; where an exception ended it, that
        is the error's `__cause__`.
        """
        batch = _as_batch(prompts)
        requests = self._prepare(batch, _one_each(sampling_params, len(batch)), _priorities(priority, len(batch)))
        return self._run(requests, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; messages are {"role": ..., "content": ...} as for the chat template.

        continue_final_message: go on with the last message, an assistant's, instead of beginning another; the output is
        what comes behind it. add_generation_prompt excludes it; None: true without it.
        """
        return self.generate(
            [
                self.chat_prompt(
                    m,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **template_args,
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
        (request,) = self._prepare([prompt], [sampling_params], [0])
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        self.frontend.start(request)
        try:
            while not request.is_finished:
                self.engine.step()
                yield from request.deltas()
            if request.error:
                raise request.as_error()
            yield from request.deltas()
        finally:
            self.frontend.abort(request)

    def _prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], priorities: Sequence[int]
    ) -> list[Request]:
        requests = []
        for index, (prompt, one, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                requests.append(self.frontend.prepare(prompt, one, priority=priority))
            except ForedraftError as error:
                raise type(error)(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from error
        return requests

    def _run(self, requests: list[Request], progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        num_finished = 0
        try:
            for request in requests:
                self._start(request)
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
        outputs = [request.final_output() for request in requests]
        failed = next((request for request in requests if request.error), None)
        if failed is not None:
            raise failed.as_error(outputs)
        return outputs

    def _start(self, request: Request) -> None:
        """What keeps it from starting is its own affair; the others go on."""
        try:
            self.frontend.start(request)
        except Exception as error:
            self.frontend.abort(request)
            request.fail(error)


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


def _priorities(priority: Sequence[int] | None, count: int) -> Sequence[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or len(priority) != count:
        raise ForedraftError(f"priority must be a list of integers, one for each of the {count} prompts")
    return priority
