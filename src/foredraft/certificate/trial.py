"""Texts written on trial: with the user's models and settings, and a verifier that may be broken; and what a test of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from foredraft.certificate.drafts import FirstDraft, WatchedDrafter
from foredraft.certificate.report import CheckResult
from foredraft.engine.methods import NO_DRAFT
from foredraft.engine.sequence import Origin, TokenSequence
from foredraft.errors import RequestError
from foredraft.llm import LLM
from foredraft.model import LanguageModel
from foredraft.policy import Policy
from foredraft.sampling import Sampler, SamplingParams
from foredraft.text.grammar import Grammar
from foredraft.text.request import Prompt, Request
from foredraft.verify import Verifier, verify


class Text(NamedTuple):
    """tokens: prompt and output. firsts: what its steps began with, by position in tokens (WatchedDrafter). grammar: that of
    its structured_outputs. origins: of the output tokens; none where nobody asks."""

    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    firsts: Mapping[int, FirstDraft] = {}
    grammar: Grammar | None = None
    origins: Sequence[Origin] = ()

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def upto(self, length: int) -> Text:
        """Its first `length` tokens of output."""
        return self._replace(tokens=self.tokens[: self.prompt_len + length])

    def fresh_sampler(self) -> Sampler:
        """As the request had it when it began, with nothing that the engine's own has seen: counts, and the walk of the
        constraint, begin anew."""
        own = self.sampler
        return Sampler(
            own.params,
            self.tokens[: self.prompt_len],
            own.generator,
            child=own.child,
            end_ids=own.end_ids,
            bad_words=own.bad_words,
            constraint=self.grammar.start(self.prompt_len) if self.grammar else None,
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """Who is tried. verifier: what decides on the drafts; target: what reads."""

    llm: LLM
    verifier: Verifier = verify
    target: LanguageModel | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Of the real verifier. num_drafted: draft tokens; num_sampled: those that were drawn from a law. left_out: what could
    not be tested, a line each. max_len: tokens of the longest text, prompt included."""

    results: Sequence[CheckResult]
    num_drafted: int
    num_sampled: int
    left_out: Sequence[str] = ()
    max_len: int = 0


class Rejection(NamedTuple):
    """Of a broken verifier. by: the test that rejected it, None if none did. num_tokens: looked at. power: see
    ControlResult. is_cut: it was not rejected yet when the time was over."""

    by: str | None
    num_tokens: int
    power: float | None
    is_cut: bool = False


class Test(Protocol):
    @property
    def kind(self) -> str:
        """Of what is looked at (controls.py)."""
        ...

    def run(self) -> Found:
        """Try the real verifier. Once, and before `reject`."""
        ...

    def reject(self, subject: Subject) -> Rejection:
        """Try a broken one on no more than the real one was tried on, until it is rejected or the time is over."""
        ...


class Trial:
    """One engine of a subject, and its texts. policy: whom to ask; None as the LLM does. length: draft tokens of a step,
    about. script: full texts to draft from, in the order in which they are written (WatchedDrafter).

    Raises ForedraftError while requests of the LLM run."""

    def __init__(
        self, subject: Subject, seed: int, policy: Policy | None, length: int, script: Sequence[Text] = ()
    ) -> None:
        texts = {i: text.tokens for i, text in enumerate(script)}
        wrong_every = max(3, 2 * length - 1)
        self._drafters = {
            name: WatchedDrafter(drafter, fills=name != NO_DRAFT, wrong_every=wrong_every, script=texts)
            for name, drafter in subject.llm.drafters.items()
        }
        self._frontend = subject.llm.trial(
            self._drafters, target=subject.target, policy=policy, seed=seed, verifier=subject.verifier
        )

    @property
    def num_drafted(self) -> int:
        return sum(drafter.num_drafted for drafter in self._drafters.values())

    @property
    def num_sampled(self) -> int:
        """Of these, the ones that were drawn from a law."""
        return sum(drafter.num_sampled for drafter in self._drafters.values())

    def write(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Text]:
        """All texts of all prompts, prompt after prompt. Raises RequestError for one that failed on its way."""
        requests = [self._frontend.prepare(prompt, params) for prompt in prompts]
        try:
            for request in requests:
                self._frontend.start(request)
            while not all(request.is_finished for request in requests):
                self._frontend.engine.step()
        finally:
            for request in requests:
                self._frontend.abort(request)
        return [self._text(request, sequence) for request in requests for sequence in request.sequences]

    def _text(self, request: Request, sequence: TokenSequence) -> Text:
        if sequence.error:
            raise RequestError(f"request {request.request_id}: {sequence.error}") from sequence.failure
        firsts = {
            position: first
            for drafter in self._drafters.values()
            for position, first in drafter.take(sequence.seq_id).items()
        }
        return Text(sequence.tokens, sequence.prompt_len, sequence.sampler, firsts, request.grammar, sequence.origins)


def plain(params: SamplingParams) -> SamplingParams:
    return replace(params, speculative_tokens=0)
