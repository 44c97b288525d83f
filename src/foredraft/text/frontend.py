"""Checks and tokenises prompts, and runs them in the engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.engine.engine import Engine
from foredraft.engine.run import run_steps
from foredraft.errors import ForedraftError
from foredraft.model import ModelInputs
from foredraft.sampling import CheckpointRules, SamplingParams
from foredraft.text.grammar import Grammar, Grammars
from foredraft.text.outputs import RequestOutput
from foredraft.text.request import Prompt, Request
from foredraft.text.stream import TextStream
from foredraft.text.tokenizing import bad_words_ids, encode_prompt
from foredraft.utils.interrupts import DeferredInterrupt

_DECODER_PROMPT = "decoder_prompt_token_ids"
_FEATURES = "input_features"


class Frontend:
    """Turns prompts into requests, and requests into sequences in the engine.

    tokenizer: None if all prompts are token ids. defaults: the checkpoint's sampling defaults. grammars: for this
    tokenizer; None creates them.
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
        self._rules = CheckpointRules.of(defaults)
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
        """Check and tokenise a prompt, and compile its grammar. Nothing runs yet.

        client: the sender of the request; clients are served fairly. priority: orders the requests of one client; lower values run
        first. request_id: None generates one. Raises ForedraftError for a request that cannot be honoured.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ForedraftError(f"priority must be an integer, not {priority!r}")
        if params is not None and not isinstance(params, SamplingParams):
            raise ForedraftError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        resolved = (params or SamplingParams()).resolve(self._defaults)
        if self.tokenizer is None and (resolved.stop_strings or resolved.bad_words):
            raise ForedraftError("stop strings and bad_words need a tokenizer: give tokenizer=")
        text, ids, inputs = self._inputs_of(prompt)
        self.engine.check(inputs.tokens, resolved, inputs.source)
        return Request(
            request_id=str(next(self._request_ids)) if request_id is None else request_id,
            prompt=text,
            prompt_ids=ids,
            inputs=inputs,
            params=resolved,
            tokenizer=self.tokenizer,
            bad_words=bad_words_ids(self.tokenizer, resolved.bad_words) if self.tokenizer else [],
            grammar=self._grammar_of(resolved),
            client=client,
            priority=priority,
        )

    def must_compile(self, params: SamplingParams | None) -> bool:
        """Whether `prepare` has a grammar to compile, which may take seconds. Raises ForedraftError for one that cannot be
        read."""
        outputs = params.structured_outputs if isinstance(params, SamplingParams) else None
        return outputs is not None and self.grammars is not None and not self.grammars.is_known(outputs)

    def start(self, request: Request) -> None:
        """Submit the request's n sequences; the later ones wait until the first has read the common prompt."""
        with DeferredInterrupt():
            self._start(request)

    def _start(self, request: Request) -> None:
        meter = request.grammar.meter() if request.grammar else None
        for child in range(request.params.n):
            stream = None
            if self.tokenizer is not None:
                stream = TextStream.for_request(self.tokenizer, request.inputs.tokens, request.params)
            sequence = self.engine.add(
                request.inputs.tokens,
                request.params,
                source=request.inputs.source,
                stop_rule=stream,
                bad_words=request.bad_words,
                rules=self._rules,
                constraint=request.grammar.start(len(request.inputs.tokens), meter) if request.grammar else None,
                child=child,
                wait_for=request.sequences[0] if child and request.params.prefix_caching else None,
                client=request.client,
                priority=request.priority,
            )
            request.add_text(sequence, stream)

    def start_isolated(self, request: Request) -> None:
        """Like start, but never raises: an error ends only this request, and is stored in its `failure`."""
        try:
            self.start(request)
        except Exception as error:
            self.abort(request)
            request.fail(error)

    def abort(self, request: Request) -> None:
        """End the request at any moment between steps. Harmless if it has finished, or was never started."""
        for sequence in request.sequences:
            self.engine.abort(sequence)

    def steps(
        self, requests: Sequence[Request], *, timer: AbstractContextManager[object] | None = None
    ) -> Generator[None, None, None]:
        """Run the requests to their end, yielding after each step of the engine. Closing the generator aborts them.

        Other requests of the engine advance too. A request that fails does not raise here: see `Request.error`.
        timer: entered while the requests start and for each step, but not while the caller runs.
        """
        return run_steps(self.engine, requests, submit=self.start_isolated, abort=self.abort, timer=timer)

    def run(self, requests: Sequence[Request]) -> None:
        """Run the requests to their end. Raises RequestError, after the others are finished, if one of them failed."""
        for _ in self.steps(requests):
            pass
        raise_first_failure(requests)

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise ForedraftError("structured_outputs need a tokenizer: give tokenizer=")
        return self.grammars.compile(params.structured_outputs)

    def _inputs_of(self, prompt: Prompt) -> tuple[str | None, list[int], ModelInputs]:
        """-> the prompt's text (None if there is none), its ids (the decoder's ids for audio features), and the model's inputs"""
        if isinstance(prompt, Mapping) and _FEATURES in prompt:
            if "prompt" in prompt or "prompt_token_ids" in prompt:
                raise ForedraftError(
                    f"give {_FEATURES} or a prompt, not both: the ids that the text begins with go in {_DECODER_PROMPT}"
                )
            inputs = self._with_decoder_prompt(self.engine.model.inputs_for_features(prompt[_FEATURES]), prompt)
            return None, inputs.tokens, inputs
        self.engine.model.check_reads_text()
        text, ids = self._tokenise(prompt)
        return text, ids, self._with_decoder_prompt(self.engine.model.inputs_for(ids), prompt)

    def _with_decoder_prompt(self, inputs: ModelInputs, prompt: Prompt) -> ModelInputs:
        """Let the decoder of an encoder-decoder begin with the ids that the prompt gives, if any. Raises ForedraftError."""
        if not isinstance(prompt, Mapping) or _DECODER_PROMPT not in prompt:
            if self.engine.model.has_encoder and not inputs.tokens:
                raise ForedraftError(
                    f"the checkpoint does not specify the language: give {_DECODER_PROMPT}, the ids of its start, a language, "
                    "a task and no timestamps, or set language in its generation_config"
                )
            return inputs
        if not self.engine.model.has_encoder:
            raise ForedraftError(f"{_DECODER_PROMPT} is for encoder-decoders: put the ids in the prompt")
        return inputs._replace(tokens=_checked_ids(prompt[_DECODER_PROMPT]))

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """-> the prompt's text (None if ids are given) and its ids"""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return None, _checked_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ForedraftError(
                    'a prompt given as a dict needs "prompt" or "prompt_token_ids", or "input_features"'
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            return None, _checked_ids(prompt)
        if self.tokenizer is None:
            raise ForedraftError("a text prompt needs a tokenizer: give tokenizer=, or token ids as the prompt")
        if isinstance(prompt, str) and not prompt:
            raise ForedraftError("the prompt is empty: give some text, or token ids")
        ids = encode_prompt(self.tokenizer, prompt)  # type: ignore[arg-type]  # it rejects anything but text
        return str(prompt), ids


def raise_first_failure(requests: Sequence[Request]) -> None:
    """Raises RequestError, with its output, if one of the requests failed."""
    failed = next((request for request in requests if request.error), None)
    if failed is not None:
        raise failed.as_error()


def raise_first_failed_prompt(requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> None:
    """Raises RequestError, with the index of the prompt if there are several, if a request of a call failed. requests: one for each
    prompt. outputs: of all, for the error."""
    for index, request in enumerate(requests):
        if request.error:
            raise request.as_error(outputs, f"prompt {index}: " if len(requests) > 1 else "")


def _checked_ids(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ForedraftError("a prompt must be text or a list of token ids")
    return list(ids)
