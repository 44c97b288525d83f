"""Texts written on trial: with the user's models and settings, and a verifier that may be broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foredraft.certificate.drafts import FirstDraft, WatchedDrafter
from foredraft.equipment import NO_DRAFT
from foredraft.errors import RequestError
from foredraft.llm import LLM
from foredraft.model import LanguageModel
from foredraft.policy import Policy
from foredraft.request import Prompt, Request
from foredraft.sampling import Sampler, SamplingParams
from foredraft.sequence import TokenSequence
from foredraft.verify import Verifier, verify


class Text(NamedTuple):
    """tokens: prompt and output. firsts: what its steps began with, by position in tokens (WatchedDrafter)."""

    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    firsts: Mapping[int, FirstDraft] = {}

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def fresh_sampler(self, like: Sampler | None = None) -> Sampler:
        """As the request had it when it began: a sampler counts the tokens of the text that it has seen. like: one of
        this text with other parameters."""
        return (like or self.sampler).fresh(self.tokens[: self.prompt_len])


@dataclass(frozen=True, slots=True)
class Subject:
    """Who is tried. verifier: what decides on the drafts; target: what reads."""

    llm: LLM
    verifier: Verifier = verify
    target: LanguageModel | None = None


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
        return Text(sequence.tokens, sequence.prompt_len, sequence.sampler, firsts)


def plain(params: SamplingParams) -> SamplingParams:
    return replace(params, speculative_tokens=0)
