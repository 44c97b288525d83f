"""From a prompt to sequences in the engine, and from those to outputs and deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.engine.engine import Engine
from foredraft.engine.sequence import TokenLogprobs, TokenSequence
from foredraft.engine.stats import SpeculationStats
from foredraft.errors import ForedraftError, RequestError, message_of
from foredraft.sampling import SamplingParams
from foredraft.text.grammar import Grammar, Grammars
from foredraft.text.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculativeDecodingMetrics,
)
from foredraft.text.text import TextStream, bad_words_ids, encode_prompt

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids} as in vLLM."""


@dataclass(slots=True)
class _Text:
    """One of the n texts: its sequence, its stream of characters, and how much of it was delivered."""

    sequence: TokenSequence
    stream: TextStream | None
    num_delivered: int = 0
    is_closed: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its n texts. client, priority: see TokenSequence."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    bad_words: list[tuple[int, ...]]
    grammar: Grammar | None = None
    client: str = ""
    priority: int = 0
    texts: list[_Text] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def sequences(self) -> list[TokenSequence]:
        return [text.sequence for text in self.texts]

    @property
    def prompt_text(self) -> str:
        """As it was given, else as the tokenizer shows it."""
        if self.prompt is not None or self.tokenizer is None:
            return self.prompt or ""
        return str(self.tokenizer.decode(self.prompt_ids, skip_special_tokens=self.params.skip_special_tokens))

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def error(self) -> str | None:
        """What went wrong, of a request that failed."""
        if self.failure is not None:
            return message_of(self.failure)
        return next((sequence.error for sequence in self.sequences if sequence.error), None)

    def fail(self, error: Exception) -> None:
        """What was raised outside of its texts' steps."""
        self.failure = self.failure or error

    def as_error(self, outputs: Sequence[RequestOutput] | None = None) -> RequestError:
        """outputs: of the whole call; None: this request's."""
        found = [self.final_output()] if outputs is None else outputs
        error = RequestError(f"request {self.request_id}: {self.error}", list(found))
        error.__cause__ = self.failure or next((s.failure for s in self.sequences if s.failure), None)
        return error

    def deltas(self) -> list[Delta]:
        """What is new since the last call. The last one of the request carries its output."""
        found = []
        for index, text in enumerate(self.texts):
            sequence = text.sequence
            new_ids = sequence.tokens[sequence.prompt_len + text.num_delivered :]
            if text.is_closed or not (new_ids or sequence.is_finished):
                continue
            piece = text.stream.delta(finished=sequence.is_finished) if text.stream else ""
            origins = sequence.origins[text.num_delivered :]
            logprobs = self._logprobs(sequence.logprobs[text.num_delivered :])
            text.num_delivered += len(new_ids)
            text.is_closed = sequence.is_finished
            last = self.output() if all(t.is_closed for t in self.texts) else None
            stop_reason = _stop_reason(text) if sequence.is_finished else None
            found.append(
                Delta(index, piece, new_ids, origins, sequence.finish_reason, last, logprobs, stop_reason=stop_reason)
            )
        return found

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(index, text) for index, text in enumerate(self.texts)],
            finished=self.is_finished,
            metrics=self._metrics(),
        )

    def final_output(self) -> RequestOutput:
        """The output; where it cannot be made the request has failed, and it has the ids alone."""
        try:
            return self.output()
        except Exception as error:
            self.fail(error)
            outputs = [self._bare_completion(index, text.sequence) for index, text in enumerate(self.texts)]
            return RequestOutput(
                self.request_id, self.prompt, list(self.prompt_ids), None, outputs, self.is_finished, self._metrics()
            )

    def _bare_completion(self, index: int, sequence: TokenSequence) -> CompletionOutput:
        return CompletionOutput(
            index, "", sequence.output_ids, list(sequence.origins), None, None, "error", None, error=self.error
        )

    def _completion(self, index: int, text: _Text) -> CompletionOutput:
        sequence = text.sequence
        logprobs = self._logprobs(sequence.logprobs)
        return CompletionOutput(
            index=index,
            text=_text_of(text),
            token_ids=sequence.output_ids,
            origins=list(sequence.origins),
            cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=_stop_reason(text),
            error=sequence.error,
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(self._as_dict(entry) for entry in self.sequences[0].prompt_logprobs)]

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]] | None:
        return None if self.params.logprobs is None else [self._as_dict(entry) for entry in entries]

    def _as_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token's own entry first, then the most likely others, as in vLLM."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._decoded(entry.token_id))}
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(token, Logprob(logprob, rank, self._decoded(token)))
        return found

    def _decoded(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode([token_id]))

    def _metrics(self) -> RequestMetrics:
        sequences = self.sequences
        stats = sum((sequence.stats for sequence in sequences), SpeculationStats())
        arrived = min((sequence.arrived_at for sequence in sequences), default=0.0)
        firsts = [s.first_token_at for s in sequences if s.first_token_at is not None]
        begun = [s.begun_at for s in sequences if s.begun_at is not None]
        lasts = [s.last_token_at for s in sequences if s.last_token_at is not None]
        gaps = [
            (s.last_token_at - s.first_token_at, s.num_output - 1)
            for s in sequences
            if s.first_token_at is not None and s.last_token_at is not None
        ]
        num_gaps = sum(n for _, n in gaps)
        num_output = sum(s.num_output for s in sequences)
        return RequestMetrics(
            time_to_first_token=min(firsts) - arrived if firsts else None,
            inter_token_latency=sum(t for t, _ in gaps) / num_gaps if num_gaps else None,
            tokens_per_second=num_output / (max(lasts) - arrived) if lasts else None,
            num_preemptions=sum(s.num_preemptions for s in sequences),
            num_cached_tokens=sequences[0].num_cached if sequences else 0,
            speculative_decoding=SpeculativeDecodingMetrics.of(stats),
            stats=stats,
            time_in_queue=min(begun) - arrived if begun else None,
        )


class Frontend:
    """Checks and tokenises prompts, and hands them to the engine.

    tokenizer: None where prompts are token ids only. defaults: the checkpoint's sampling defaults. grammars: for this
    tokenizer; None makes its own.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | None,
        defaults: Mapping[str, Any],
        grammars: Grammars | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._defaults = defaults
        if grammars is None and tokenizer is not None:
            grammars = Grammars(tokenizer, sorted(engine.end_ids))
        self.grammars = grammars
        self._request_ids = count()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        client: str = "",
        priority: int = 0,
        request_id: str | None = None,
    ) -> Request:
        """Everything that can be refused, before anything runs. Raises ForedraftError.

        client: whose request it is; clients are served fairly. priority: among the requests of one client; the lower, the
        earlier. request_id: None makes one.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ForedraftError(f"priority must be an integer, not {priority!r}")
        if params is not None and not isinstance(params, SamplingParams):
            raise ForedraftError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        resolved = (params or SamplingParams()).resolve(self._defaults)
        if self.tokenizer is None and (resolved.stop_strings or resolved.bad_words):
            raise ForedraftError("stop strings and bad_words need a tokenizer: give tokenizer=")
        text, ids = self._ids_of(prompt)
        self.engine.check(ids, resolved)
        words = bad_words_ids(self.tokenizer, resolved.bad_words) if self.tokenizer else []
        grammar = self._grammar_of(resolved)
        name = str(next(self._request_ids)) if request_id is None else request_id
        return Request(name, text, ids, resolved, self.tokenizer, words, grammar, client, priority)

    def must_compile(self, params: SamplingParams | None) -> bool:
        """Whether `prepare` takes as long as a grammar takes to compile. Raises ForedraftError for one that cannot be read."""
        wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
        return wanted is not None and self.grammars is not None and not self.grammars.is_known(wanted)

    def start(self, request: Request) -> None:
        """Queue the request's n texts; the later ones wait for the first to read the common prompt."""
        meter = request.grammar.meter() if request.grammar else None
        for child in range(request.params.n):
            stream = None
            if self.tokenizer is not None:
                stream = TextStream.for_request(self.tokenizer, request.prompt_ids, request.params)
            sequence = self.engine.add(
                request.prompt_ids,
                request.params,
                stop_rule=stream,
                bad_words=request.bad_words,
                constraint=request.grammar.start(len(request.prompt_ids), meter) if request.grammar else None,
                child=child,
                wait_for=request.sequences[0] if child and request.params.prefix_caching else None,
                client=request.client,
                priority=request.priority,
            )
            request.texts.append(_Text(sequence, stream))

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            self.engine.abort(sequence)

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise ForedraftError("structured_outputs need a tokenizer: give tokenizer=")
        return self.grammars.compile(params.structured_outputs)

    def _ids_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return None, _checked_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ForedraftError('a prompt given as a dict needs "prompt" or "prompt_token_ids"')
            prompt = prompt["prompt"]
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            return None, _checked_ids(prompt)
        if self.tokenizer is None:
            raise ForedraftError("a text prompt needs a tokenizer: give tokenizer=, or token ids as the prompt")
        if isinstance(prompt, str) and not prompt:
            raise ForedraftError("the prompt is empty: give some text, or token ids")
        ids = encode_prompt(self.tokenizer, prompt)  # type: ignore[arg-type]  # it refuses what is no text
        return str(prompt), ids


def _checked_ids(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ForedraftError("a prompt must be text or a list of token ids")
    return list(ids)


def _stop_reason(text: _Text) -> int | str | None:
    found = text.stream.stop_reason if text.stream else None
    return text.sequence.stop_reason if found is None else found


def _text_of(text: _Text) -> str:
    if text.stream is None:
        return ""
    return text.stream.finish() if text.sequence.is_finished else text.stream.text
