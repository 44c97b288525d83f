"""LLM, the offline API: prompts in, texts out."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.drafters import RefitSchedule, refits_of
from foredraft.engine.build import EngineBuilder, EngineSettings, Thresholds
from foredraft.engine.embedded_models import with_embedded_models
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.methods import (
    OWN_DRAFTS,
    Methods,
    check_adapt,
    check_draft_server,
    check_exit_layer,
    choose_methods,
    name_of,
    names_of,
)
from foredraft.engine.models import HeadIdentity, LoadedModels, ModelSource, check_decoder_only, draft_method_of
from foredraft.engine.proposal import Drafter
from foredraft.engine.scheduler import Limits
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.heads import AnyHead, HeadOptions
from foredraft.model import LanguageModel, LoadOptions
from foredraft.policy import Guard, Policy
from foredraft.remote import DraftServerAccess
from foredraft.sampling import AUTO, SamplingParams
from foredraft.settings import Settings
from foredraft.text.chat_template import render_chat
from foredraft.text.frontend import Frontend, raise_first_failed_prompt, raise_first_failure
from foredraft.text.grammar import Grammars
from foredraft.text.inputs import Messages, as_conversations, as_prompts, params_for_each, priority_for_each
from foredraft.text.outputs import Delta, RequestOutput
from foredraft.text.request import Prompt, Request
from foredraft.utils.arguments import (
    NO_TREES,
    check_draft_len,
    check_head_options,
    check_heterogeneous_vocab,
    check_name,
    check_numbers,
    check_threads,
    check_token_tree,
)
from foredraft.verify import Rule, Verifier, checked_rules, verify
from foredraft.vocabulary import VocabularyPair

MAX_SPECULATIVE_TOKENS = 8


class LLM:
    """A target model, its drafters, and an engine that runs them. Not thread-safe; AsyncLLM runs one in a thread of its own.

    model: hub id, directory, or a loaded transformers model, decoder-only or encoder-decoder; None loads the embedded target, with
        the embedded draft model, or the embedded head for method="eagle".
    draft_model: the same for the draft model, or the hub id or directory of a head for the target: EAGLE, DFlash or Medusa. MTP
        layers are read from the target's own checkpoint: method="mtp".
    heterogeneous_vocab: how to use a draft model whose vocabulary differs from the target's: "slem" encodes its text with the
        target's tokenizer and compares, "tli" limits its draws to the tokens of both vocabularies, "none" refuses it. None or "auto":
        "tli" if the vocabularies are similar, else "slem". Both need models with tokenizers (see docs/guides/other-tokenizers.md).
    method: the drafter, one of "none", "ngram", "suffix", "draft_model", "pard", "eagle", "peagle", "dflash", "medusa",
        "mtp", "early_exit", "remote", "self-int8" and "self-int4" (a copy of the target in int8 or int4), or any object with
        propose and forget. With a list of them (or names with "+" between them), each step chooses among them. None: the method
        that draft_model is for, else "early_exit" with exit_layer; "remote" too with draft_server; "suffix" without any of these.
    exit_layer: how many of the target's first layers method "early_exit" drafts with. A trained exit, given as draft_model, has
        its own.
    speculative_tokens: γ, draft tokens per step, unless a request sets its own. "auto" measures the cost and the gain of
        drafting and drafts as long as that is faster, down to nothing; with a number, the first drafter drafts. None: "auto".
    max_speculative_tokens: the most tokens that "auto" drafts per step; None: 8.
    speculative_token_tree: whether drafters may draft trees. "none": chains only. "auto": where speculative_tokens="auto" finds that
        trees are faster. Or a fixed shape, given by the path of ranks to each node: [[0], [1], [0, 0]] tries the two most likely
        tokens, and one token after the more likely of them. speculative_tokens is then the number of nodes, or fewer: only the first
        ones are drafted. If several methods draft trees of such a shape, these are merged into one. None: "none".
    min_acceptance_rate, max_draft_memory: a drafter is not used for a while after its recent acceptance rate falls below
        this, or after it holds more bytes of the cache memory than this. A warning is logged, and `crossings` counts it.
        None: no limit.
    head_window: the most tokens that a row of an EAGLE head attends to; 0: all. None: the length of its training texts, if its
        files say so.
    head_settings: settings of a head by name, which override those in its files, such as {"norm_before_residual": True} (see
        docs/guides/heads.md). None: those in its files; settings that are missing there are chosen by trying them on a short text.
    draft_server: the address of a process that drafts (`foredraft draft-server`), such as "tcp://10.0.0.2:5757", for method "remote".
        Or a mapping of its "address", the "key_file" (if the environment variable FOREDRAFT_DRAFT_KEY does not hold the key), and
        "max_wait", the most seconds that a step waits for its drafts, 0.1 by default (see docs/guides/remote-drafts.md).
    adapt: whether drafters may learn from the generated texts; so far only Medusa heads can (see docs/guides/heads.md). This changes
        the drafts, never the output. With speculative_tokens "auto" learning takes at most 1 % of the time, otherwise it happens
        every 64 steps. None: no.
    tokenizer: for a model without a tokenizer of its own, or a model object.
    dtype, device, revision, trust_remote_code: as in transformers, for both models.
    device_map: for the target, as in transformers: "auto" spreads its layers over all GPUs, a mapping assigns modules to devices.
    tp_plan: "auto" splits the target among the processes of torchrun, each of which creates the same LLM. Only the first process
        continues; the others compute their share, and end with the first (see docs/guides/scaling.md).
    quantization: "int8" rounds the linear layers to eight bits while they are loaded; "int4" rounds them to four but the lm_head to
        eight, "int4-all" the lm_head to four too; None leaves them as they are.
    draft_quantization: the same for the draft, or for all matrices of a head; None: as the target, but if the target is rounded or
        stored in few bits, a head in eight bits, a large EAGLE head in four; "none": none. It may lower acceptance but never changes
        the output.
    batch_invariant: on a GPU, use matrix products that compute each row independently of the others, so that a greedy or
        seeded text does not depend on drafts or on other requests (see docs/internals/gpu.md). No effect on a CPU.
    seed: for the noise of requests without a seed. Their texts are reproducible only if speculative_tokens is a number, since
        "auto" depends on measured times (requests with SamplingParams.seed are always reproducible).
    num_threads: of PyTorch's CPU kernels, for the whole process.
    cache_memory: bytes for the KV caches of the target and the drafts; None takes what max_num_seqs full contexts need, at most
        half of the free memory.
    max_num_seqs, max_num_batched_tokens: the most sequences that run at a time, and the most rows of one pass.
    enable_prefix_caching: keep the keys and values of finished texts for later prompts with the same prefix, until the memory is
        needed. SamplingParams.prefix_caching turns it off for one request.
    verification_rules: custom rules by name, for SamplingParams.verification (see docs/guides/adding-a-verification-rule.md).
    config: a TOML file with some of these settings, such as `foredraft tune` writes; arguments override it.

    Raises ForedraftError (a ValueError) with a one-line message for a model, a pair of models or a setting that cannot work.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        draft_model: ModelSource | None = None,
        *,
        method: Methods | None = None,
        exit_layer: int | None = None,
        speculative_tokens: int | str | None = None,
        max_speculative_tokens: int | None = None,
        speculative_token_tree: Sequence[Sequence[int]] | str | None = None,
        min_acceptance_rate: float | None = None,
        max_draft_memory: int | None = None,
        heterogeneous_vocab: str | None = None,
        head_window: int | None = None,
        head_settings: Mapping[str, Any] | None = None,
        draft_server: str | Mapping[str, Any] | None = None,
        adapt: bool | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        device_map: str | Mapping[str, int | str] | None = None,
        tp_plan: str | None = None,
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
        check_name("model", model, or_object=PreTrainedModel)
        check_name("draft_model", draft_model, or_object=PreTrainedModel)
        check_name("config", config)
        settings = with_embedded_models(
            _read_settings(config)
            .override(model=model, draft_model=draft_model, method=method, exit_layer=exit_layer, adapt=adapt)
            .override(speculative_tokens=speculative_tokens, max_speculative_tokens=max_speculative_tokens)
            .override(speculative_token_tree=speculative_token_tree, heterogeneous_vocab=heterogeneous_vocab)
            .override(head_window=head_window, head_settings=head_settings, draft_server=draft_server)
            .override(quantization=quantization, draft_quantization=draft_quantization, num_threads=num_threads)
        )
        bounds = Limits(max_num_seqs, max_num_batched_tokens), Thresholds(min_acceptance_rate, max_draft_memory)
        engine = _engine_settings(settings, *bounds, cache_memory, seed, enable_prefix_caching, verification_rules)
        options = LoadOptions(dtype, device, revision, trust_remote_code, device_map=device_map, tp_plan=tp_plan)
        options = replace(options, quantization=settings.quantization, batch_invariant=batch_invariant)
        self._builder = _load(settings, engine, tokenizer, options)
        self._start_engine(*self._builder.drafters())

    @property
    def tree_shape(self) -> TreeShape | None:
        """The shape of drafts with a fixed number of tokens; None: chains. See speculative_token_tree."""
        return self._builder.settings.shape

    def with_drafter(
        self,
        method: Methods | None = None,
        speculative_tokens: int | str | None = None,
        speculative_token_tree: Sequence[Sequence[int]] | str | None = None,
    ) -> LLM:
        """A second LLM with other drafters and its own engine, over the same models, tokenizer and cache memory.

        None: as in this LLM. No model is loaded twice; a copy of the target as a draft model ("self-int8") is loaded when it is
        first needed. Since the two share the models, run only one of them at a time.

        Raises ForedraftError for a method that does not exist, or that needs a draft model where there is none.
        """
        builder = self._builder
        methods, draft_len = builder.methods, builder.speculative_tokens
        if method is not None:
            makes_draft = isinstance(method, str) and method in OWN_DRAFTS  # then the draft model is not used
            has_draft_model = builder.models.has_draft and not makes_draft
            has_exit_layer = builder.models.has_exit_layer
            methods = choose_methods(
                method,
                has_draft_model=has_draft_model,
                has_exit_layer=has_exit_layer,
                has_draft_server=builder.settings.draft_server is not None,
            )
        settings = builder.settings
        if speculative_token_tree is not None:
            shape, auto_trees = _trees_of(speculative_token_tree)
            settings = replace(settings, shape=shape, auto_trees=auto_trees)
            draft_len = draft_len if shape is None else _draft_len_of(speculative_tokens, shape)
        if speculative_tokens is not None:
            check_draft_len(speculative_tokens)
            draft_len = speculative_tokens
        builder.models.load_own_drafts(methods)
        other = copy(self)
        other._builder = EngineBuilder(builder.models, settings, methods, draft_len)
        other._start_engine(*other._builder.drafters(self.engine.pool), self.frontend.grammars)
        return other

    def trial(
        self,
        drafters: Mapping[str, Drafter],
        *,
        target: LanguageModel | None = None,
        policy: Policy | None = None,
        seed: int | None = None,
        verifier: Verifier = verify,
    ) -> Frontend:
        """Make another engine with the settings of this one, for tests without side effects. Its keys and values take the memory
        that the drafters leave free, and are freed with it.

        drafters: used instead of this LLM's. policy: None makes one like this LLM's, which starts from what was measured so
        far and saves nothing. target: None takes this LLM's.

        Raises ForedraftError while requests of this LLM are running, since both would use the same drafters.
        """
        if self.engine.has_work:
            raise ForedraftError("this LLM has running requests: finish or close them first")
        self.engine.drop_retained()
        policy = policy or self._builder.policy(drafters, saves_state=False)
        if policy not in self._trial_policies:
            self._trial_policies.append(policy)
        pool = MemoryPool(self.engine.pool.free)
        engine = self._builder.engine(drafters, pool, policy, target=target, seed=seed, verifier=verifier)
        return self._new_frontend(engine, self.frontend.grammars)

    def _start_engine(self, drafters: dict[str, Drafter], pool: MemoryPool, grammars: Grammars | None = None) -> None:
        """grammars: compiled grammars, shared by engines with the same tokenizer."""
        builder, settings = self._builder, self._builder.settings
        self.drafters = drafters
        self._trial_policies: list[Policy] = []
        self.policy = builder.guarded(builder.policy(drafters), drafters)
        self.engine = builder.engine(drafters, pool, self.policy, seed=settings.seed, retain=settings.retain)
        self.frontend = self._new_frontend(self.engine, grammars)

    def _new_frontend(self, engine: Engine, grammars: Grammars | None) -> Frontend:
        return Frontend(engine, self.tokenizer, self._builder.models.sampling_defaults, grammars)

    @property
    def target(self) -> LanguageModel:
        return self._builder.models.target

    @property
    def draft(self) -> LanguageModel | None:
        """The draft model of the first drafter, if it has one."""
        return self._builder.models.draft_for(self._builder.methods[0])

    @property
    def vocabularies(self) -> VocabularyPair | None:
        """The vocabularies of target and draft model, and how to use them together; None if they are the same."""
        return self._builder.models.vocabularies.get("draft_model")

    @property
    def head(self) -> AnyHead | None:
        """The head that drafts in place of a draft model, if there is one."""
        return self._builder.models.head

    @property
    def head_identity(self) -> HeadIdentity | None:
        """The head's name, dtype and quantisation for reports."""
        return self._builder.models.head_identity

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._builder.models.tokenizer

    @property
    def options(self) -> LoadOptions:
        """How the target was loaded."""
        return self._builder.models.options

    @property
    def draft_options(self) -> LoadOptions:
        return self._builder.models.draft_options

    @property
    def method(self) -> str:
        """The drafters' names, with "+" between them."""
        return "+".join(map(name_of, self._builder.methods))

    @property
    def speculative_tokens(self) -> int | str:
        return self._builder.speculative_tokens

    @property
    def crossings(self) -> Counter[tuple[str, str]]:
        """How often a drafter crossed a threshold, by drafter and threshold."""
        return self.policy.crossings if isinstance(self.policy, Guard) else Counter()

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """How often a drafter stopped being used, by drafter and reason: a threshold, "memory_short", "failed" or
        "does_not_pay". Includes trials."""
        return sum((policy.fallbacks for policy in (self.policy, *self._trial_policies)), Counter())

    @property
    def refits(self) -> dict[str, RefitSchedule]:
        """The refit schedule of each drafter that adapts, by its name."""
        found = {name: refits_of(drafter) for name, drafter in self.drafters.items()}
        return {name: refits for name, refits in found.items() if refits is not None}

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at a time."""
        return self._builder.settings.limits.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its output together."""
        return self.target.traits.context_len

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises ForedraftError if there is none."""
        if self.tokenizer is None:
            raise ForedraftError("this model has no tokenizer: give token ids as the prompt, or tokenizer=")
        return self.tokenizer

    @property
    def cooldowns(self) -> dict[str, str]:
        """The drafters that are not used now, and why: "memory_short", "failed", or a threshold."""
        return self.policy.cooldowns()

    @property
    def resting(self) -> dict[str, str]:
        """Deprecated: cooldowns."""
        warnings.warn("LLM.resting is now LLM.cooldowns", DeprecationWarning, stacklevel=2)
        return self.cooldowns

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, batched. -> the outputs, in the order of the prompts

        prompts: a string, a list of token ids, or a list of either; or mappings (see Prompt), such as
        {"input_features": features} with features [num_mel_bins, num_frames] for a model that reads audio. sampling_params: one
        for all prompts, or one for each. progress: called with (number finished, number of prompts) whenever prompts finish.
        priority: one number for each prompt; lower numbers start earlier.

        Raises ForedraftError before anything runs if a prompt or its parameters cannot be honoured. If a prompt fails, raises
        RequestError with the index of the prompt after all others are complete: its `outputs` holds them, and its `__cause__` is the
        exception that ended the prompt, if there was one.
        """
        batch = as_prompts(prompts)
        params, priorities = params_for_each(sampling_params, len(batch)), priority_for_each(priority, len(batch))
        return self._run(self._prepare(batch, params, priorities), progress)

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
        """Answer one conversation or many; messages are {"role": ..., "content": ...}, as the chat template takes them.

        add_generation_prompt: begin a new assistant message; None: yes, unless continue_final_message is set.
        continue_final_message: continue the last message, which must be the assistant's; the output is its continuation.
        template_args: further variables of the template. Raises what generate raises.
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
                for m in as_conversations(messages)
            ],
            sampling_params,
        )

    def chat_prompt(self, messages: Messages, **template_args: Any) -> list[int]:
        """The token ids that `chat` makes of a conversation with the model's chat template."""
        if self.tokenizer is None:
            raise ForedraftError("a conversation needs a tokenizer with a chat template: give tokenizer=")
        return render_chat(self.tokenizer, messages, **template_args)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Complete one prompt and yield its text as it is generated. Closing the iterator ends the request.

        Other requests of the engine advance too. Raises what generate raises.
        """
        (request,) = self._prepare([prompt], [sampling_params], [0])
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        with closing(self.frontend.steps([request])) as steps:
            for _ in steps:
                yield from request.deltas()
        raise_first_failure([request])
        yield from request.deltas()

    def _prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], priorities: Sequence[int]
    ) -> list[Request]:
        requests = []
        for index, (prompt, prompt_params, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                requests.append(self.frontend.prepare(prompt, prompt_params, priority=priority))
            except ForedraftError as error:
                raise type(error)(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from error
        return requests

    def _run(self, requests: list[Request], progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        num_finished = 0
        with closing(self.frontend.steps(requests)) as steps:
            for _ in steps:
                num_before, num_finished = num_finished, sum(request.is_finished for request in requests)
                if progress is not None and num_finished != num_before:
                    progress(num_finished, len(requests))
        outputs = [request.final_output() for request in requests]
        raise_first_failed_prompt(requests, outputs)
        return outputs


def _read_settings(config: str | os.PathLike[str] | None) -> Settings:
    return Settings() if config is None else Settings.read(config)


def _engine_settings(
    settings: Settings,
    limits: Limits,
    thresholds: Thresholds,
    cache_memory: int | None,
    seed: int | None,
    retain: bool,
    rules: Mapping[str, Rule] | None,
) -> EngineSettings:
    checked, server = checked_rules(rules or {}), DraftServerAccess.of(settings.draft_server)
    most, trees = _most_draft_of(settings), _trees_of(settings.speculative_token_tree)
    return EngineSettings(
        limits, thresholds, most, cache_memory, seed, retain, checked, *trees, server, bool(settings.adapt)
    )


def _load(
    settings: Settings,
    engine_settings: EngineSettings,
    tokenizer: str | PreTrainedTokenizerBase | None,
    options: LoadOptions,
) -> EngineBuilder:
    """Check the rest of the settings, then load the models."""
    draft_len = _draft_len_of(settings.speculative_tokens, engine_settings.shape)
    check_threads(settings.num_threads)
    check_draft_len(draft_len)
    check_head_options(settings.head_window, settings.head_settings)
    check_heterogeneous_vocab(settings.heterogeneous_vocab)
    exit_layer = settings.exit_layer
    check_numbers(exit_layer=(exit_layer, 1))
    draft_method = draft_method_of(settings.draft_model, settings.method, options.revision, exit_layer)
    methods = choose_methods(
        settings.method,
        has_draft_model=settings.draft_model is not None,
        draft_method=draft_method,
        has_exit_layer=exit_layer is not None,
        has_draft_server=settings.draft_server is not None,
    )
    check_exit_layer(exit_layer, names_of(methods), draft_method)
    check_draft_server(names_of(methods), is_given=settings.draft_server is not None)
    check_adapt(names_of(methods), adapt=engine_settings.adapt)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    head_options = HeadOptions(settings.head_window, settings.head_settings or {})
    models = LoadedModels(
        settings.model,
        settings.draft_model,
        tokenizer,
        options,
        settings.draft_quantization,
        draft_method,
        head_options,
        exit_layer,
        settings.heterogeneous_vocab or AUTO,
    )
    if settings.draft_server is not None:
        check_decoder_only(models.target)
    models.load_own_drafts(methods)
    fixed_len = draft_len if isinstance(draft_len, int) else 0
    models.warm_up(engine_settings.limits.max_num_seqs, max(engine_settings.max_speculative_tokens, fixed_len))
    return EngineBuilder(models, engine_settings, methods, draft_len)


def _trees_of(given: object) -> tuple[TreeShape | None, bool]:
    """given: the argument speculative_token_tree -> the shape of drafts with a fixed number of tokens; whether "auto" may choose trees"""
    tree = NO_TREES if given is None else check_token_tree(given)
    return (None, tree == AUTO) if isinstance(tree, str) else (TreeShape.of_paths(tree), False)


def _most_draft_of(settings: Settings) -> int:
    most = settings.max_speculative_tokens
    return MAX_SPECULATIVE_TOKENS if most is None else most


def _draft_len_of(speculative_tokens: int | str | None, shape: TreeShape | None) -> int | str:
    if shape is None:
        return AUTO if speculative_tokens is None else speculative_tokens
    if speculative_tokens == AUTO:
        raise ForedraftError('speculative_token_tree has a fixed number of tokens: speculative_tokens cannot be "auto"')
    return len(shape) if speculative_tokens is None else speculative_tokens
