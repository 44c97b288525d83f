"""The texts that the checks look at: written by the user's models and a verifier that may be broken, and read again by an
independent pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.drafts import FirstLaw, RecordedDrafter
from foredraft.engine.engine import NEAR_TIE
from foredraft.engine.methods import NO_DRAFT
from foredraft.engine.sequence import Origin, TokenSequence
from foredraft.errors import RequestError
from foredraft.llm import LLM
from foredraft.model import LanguageModel, Read
from foredraft.policy import Policy
from foredraft.sampling import Row, Sampler, SamplingParams
from foredraft.text.grammar import Grammar
from foredraft.text.request import Prompt, Request
from foredraft.verify import Verifier, verify

_MOST_ROWS = 512
_MOST_LOGITS = 1 << 22
"""Numbers that one pass's logits may have: a large vocabulary gets fewer rows."""


class Text(NamedTuple):
    """tokens: prompt and output. first_laws: see RecordedDrafter. grammar: of its structured_outputs. origins: of the output
    tokens; empty where nothing reads them."""

    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    first_laws: Mapping[int, FirstLaw] = {}
    grammar: Grammar | None = None
    origins: Sequence[Origin] = ()

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def up_to(self, length: int) -> Text:
        """Its first `length` tokens of output."""
        return self._replace(tokens=self.tokens[: self.prompt_len + length])

    def rows(self) -> list[Row]:
        """One for each output token, with its own prefix. Their sampler shares no state with the engine's: counts and the
        walk of the constraint begin anew."""
        prompt, output = self.tokens[: self.prompt_len], self.output_ids
        sampler = self.sampler.fresh(prompt)
        sampler.constraint = self.grammar.start(self.prompt_len) if self.grammar else None
        return [Row(sampler, prompt, output[:i]) for i in range(len(output))]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested. verifier: decides on the drafts. target: reads; None: the LLM's."""

    llm: LLM
    verifier: Verifier = verify
    target: LanguageModel | None = None


class Trial:
    """An engine of a subject that writes texts. policy: None: like the LLM's. length: draft tokens of a step, about.
    script: full texts to draft from, in the order in which they are written (RecordedDrafter).

    Raises ForedraftError while requests of the LLM run."""

    def __init__(
        self, subject: Subject, seed: int, policy: Policy | None, length: int, script: Sequence[Text] = ()
    ) -> None:
        texts = {i: text.tokens for i, text in enumerate(script)}
        wrong_every = max(3, 2 * length - 1)
        self._drafters = {
            name: RecordedDrafter(drafter, fills=name != NO_DRAFT, wrong_every=wrong_every, script=texts)
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
        """All texts of all prompts, prompt after prompt. Raises RequestError if one of them failed."""
        requests = [self._frontend.prepare(prompt, params) for prompt in prompts]
        self._frontend.run(requests)
        return [self._text(request, sequence) for request in requests for sequence in request.sequences]

    def _text(self, request: Request, sequence: TokenSequence) -> Text:
        if sequence.error:
            raise RequestError(f"request {request.request_id}: {sequence.error}") from sequence.failure
        taken = [drafter.take(sequence.seq_id) for drafter in self._drafters.values()]
        first_laws = {position: law for laws in taken for position, law in laws.items()}
        return Text(
            sequence.tokens, sequence.prompt_len, sequence.sampler, first_laws, request.grammar, sequence.origins
        )


def without_drafts(params: SamplingParams) -> SamplingParams:
    return replace(params, speculative_tokens=0)


def shortened(params: SamplingParams, length: int) -> SamplingParams:
    """The same for texts of at most so many tokens, which are the first ones of the longer texts."""
    length = min(length, params.max_tokens or length)
    return replace(params, max_tokens=length, min_tokens=min(params.min_tokens, length))


# --- the independent pass -----------------------------------------------------------------------------------------


def read_whole(model: LanguageModel, texts: Sequence[Text]) -> Iterator[tuple[list[Text], Tensor]]:
    """Read texts from their first token, a batch at a time, using nothing that an engine held. -> (the batch, the logits
    that decided its output tokens [sum of output lengths, V], text after text). Texts without output are left out."""
    for batch in _batches([text for text in texts if text.output_ids], model.traits.vocab_size):
        cache = model.scratch_cache([len(text.tokens) for text in batch])
        reads = [Read(i, text.tokens[:-1], len(text.output_ids)) for i, text in enumerate(batch)]
        yield batch, model.read(reads, cache)


def rows_of(texts: Sequence[Text]) -> list[Row]:
    return [row for text in texts for row in text.rows()]


def row_noise(model: LanguageModel, ids: Sequence[int]) -> float:
    """By how much a logit changes with what shares its pass: a text read whole against the same text token by token. 0
    where loading found rows exact, and NEAR_TIE at least elsewhere."""
    if model.traits.row_exact:
        return 0.0
    whole = model.read([Read(0, ids, len(ids))], model.scratch_cache([len(ids)]))
    cache = model.scratch_cache([len(ids)])
    alone = [model.read([Read(0, [token], 1)], cache)[0] for token in ids]
    differences = [float((a.float() - b.float()).abs().max()) for a, b in zip(whole, alone, strict=True)]
    return max(NEAR_TIE, *differences)


@contextmanager
def one_thread() -> Iterator[None]:
    """For arithmetic in many small calls: waiting threads make it several times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batches(texts: Sequence[Text], vocab_size: int) -> Iterator[list[Text]]:
    batch: list[Text] = []
    for text in texts:
        grown = [*batch, text]
        num_rows = sum(len(text.tokens) for text in grown)
        num_logits = sum(len(text.output_ids) for text in grown) * vocab_size
        if batch and (num_rows > _MOST_ROWS or num_logits > _MOST_LOGITS):
            yield batch
            grown = [text]
        batch = grown
    if batch:
        yield batch
