"""The texts that the checks look at. The user's models write them, with the user's drafts and with worse ones, under the real
verifier or a broken one. An independent pass then reads them again.

A drafter that is nearly always right hardly exercises verification after a rejection, and one that rarely drafts exercises
nothing at all. Worse drafts still report the distributions they were drawn from, so verification must be exact for them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.controls import Control
from foredraft.certificate.surprise import surprise_of_drawn
from foredraft.engine.engine import NEAR_TIE
from foredraft.engine.methods import NO_DRAFT
from foredraft.engine.proposal import (
    CERTAIN,
    Drafter,
    DraftRequest,
    Proposal,
    bytes_held,
    grows_trees,
    reads_encoder,
    shares_cache,
    taps_of,
    trees_of,
)
from foredraft.engine.sequence import Origin, TokenSequence
from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.engine.token_tree import TreeShape
from foredraft.llm import LLM
from foredraft.model import LanguageModel, Read
from foredraft.policy import DraftBudget, FixedPolicy, Policy
from foredraft.sampling import Row, Sampler, SamplingParams, TokenProbs
from foredraft.text.grammar import Grammar
from foredraft.text.request import Prompt
from foredraft.verify import verify

_TURN = 8
"""Tokens of a text until the next drafter takes over."""
_HOTTER = 2.0
_MOST_ROWS, _MOST_LOGITS = 512, 1 << 22
"""The most of an independent pass: rows, and elements of its logits. With a large vocabulary fewer rows are read."""


# --- drafts -------------------------------------------------------------------------------------------------------


class InTurn(FixedPolicy):
    """Uses the drafters in turn, with as many draft tokens as the request wants. (A policy that drafts only what pays may draft
    nothing, and then a test shows nothing.)

    The choice of drafter depends only on a text's number and length, so it cannot bias the text.
    """

    def __init__(self, drafters: Sequence[str], shape: TreeShape | None = None) -> None:
        super().__init__(drafters[0], shape)
        self._drafters = drafters

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        # texts come in pairs: the drafts of the second are worsened
        turn = sequence.seq_id // 2 + len(sequence.tokens) // _TURN
        self._drafter = self._drafters[turn % len(self._drafters)]
        return super().draft_budget(sequence)


FirstLaw = int | TokenProbs
"""The distribution (one row) of the first draft token of a step, or the token itself if it was certain."""


@dataclass(slots=True)
class Record:
    """What the drafters of a trial drafted. num_sampled: draft tokens drawn from a distribution; num_by_heads: those drawn by
    drafters that read hidden states. first_laws: the FirstLaw of each sequence's steps, by position in its tokens; only
    where tokens are drawn independently of the drafts, so not for trees. draft_surprises: those of drawn draft tokens
    (surprise_of_drawn), a tensor for each proposal that has any."""

    num_drafted: int = 0
    num_sampled: int = 0
    num_by_heads: int = 0
    first_laws: dict[int, dict[int, FirstLaw]] = field(default_factory=dict)
    draft_surprises: list[Tensor] = field(default_factory=list)

    def add(self, proposal: Proposal, requests: Sequence[DraftRequest], *, by_head: bool) -> None:
        if (token_probs := proposal.token_probs) is not None:
            drawn = proposal.drafted & (proposal.prob_rows != CERTAIN)
            at = (each[drawn].to(token_probs.probs.device) for each in (proposal.prob_rows, proposal.ids))
            self.draft_surprises.append(surprise_of_drawn(token_probs, *at).cpu())
        for b, (request, prob_rows) in enumerate(zip(requests, proposal.draft_prob_rows, strict=True)):
            self.num_drafted += len(prob_rows)
            num_sampled = sum(row != CERTAIN for row in prob_rows)
            self.num_sampled += num_sampled
            self.num_by_heads += num_sampled if by_head else 0
            if prob_rows and not _is_certain(request) and proposal.draft_parents[b] is None:
                self.first_laws.setdefault(request.seq_id, {})[len(request.tokens)] = _first_law(proposal, b)


@dataclass(frozen=True, slots=True)
class RecordedDrafter:
    """Records what `inner` drafts, and worsens it for every second sequence. Drawn tokens come from a hotter distribution;
    certain tokens are wrong at positions divisible by wrong_every. If inner proposes nothing for such a sequence, its
    last tokens are proposed again.

    script: full texts by sequence, proposed (with wrong tokens at the same positions) in place of inner's drafts for the
    worsened sequences, so that drafts are accepted in full, in part and not at all.
    """

    inner: Drafter
    record: Record
    script: Mapping[int, Sequence[int]]
    wrong_every: int

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        requests = [_with_hotter_law(request) if _is_worsened(request) else request for request in requests]
        proposal = self.inner.propose(requests)
        rows = zip(proposal.draft_ids, proposal.draft_prob_rows, proposal.draft_parents, strict=True)
        drafts = [
            self._worsened(request, *row) if _is_worsened(request) else row
            for request, row in zip(requests, rows, strict=True)
        ]
        ids, prob_rows, parents = ([draft[column] for draft in drafts] for column in range(3))
        proposal = Proposal.of(ids, prob_rows, proposal.token_probs, trees_of(parents))  # type: ignore[arg-type]
        self.record.add(proposal, requests, by_head=bool(self.taps))
        return proposal

    @property
    def bytes_held(self) -> int:
        return bytes_held(self.inner)

    @property
    def taps(self) -> tuple[int, ...]:
        return taps_of(self.inner)

    @property
    def shares_cache(self) -> bool:
        return shares_cache(self.inner)

    @property
    def reads_encoder(self) -> bool:
        return reads_encoder(self.inner)

    @property
    def grows_trees(self) -> bool:
        return grows_trees(self.inner)

    def forget(self, seq_ids: list[int]) -> None:
        self.inner.forget(seq_ids)

    def _worsened(
        self, request: DraftRequest, ids: list[int], prob_rows: list[int], parents: Sequence[int] | None
    ) -> tuple[list[int], list[int], Sequence[int] | None]:
        start = len(request.tokens)
        if request.seq_id in self.script:
            other = self.script[request.seq_id][start:]
        else:
            other = [] if ids else request.tokens[-request.max_len :]
        if other := list(other[: request.max_len]):
            ids, prob_rows, parents = other, [CERTAIN] * len(other), None
        if parents is not None:
            return ids, prob_rows, parents
        is_wrong = [row == CERTAIN and (start + i) % self.wrong_every == 0 for i, row in enumerate(prob_rows)]
        wrong = [_another(token, request) if wrong else token for token, wrong in zip(ids, is_wrong, strict=True)]
        return wrong, prob_rows, None


def _is_worsened(request: DraftRequest) -> bool:
    return request.seq_id % 2 == 1


def _is_certain(request: DraftRequest) -> bool:
    """Whether the history determines the request's own tokens, which leaves nothing to bet on."""
    return request.sampler.is_greedy or request.sampler.is_coupled


def _with_hotter_law(request: DraftRequest) -> DraftRequest:
    if _is_certain(request):
        return request
    sampler, prompt = request.sampler, request.tokens[: request.sampler.prompt_len]
    hotter = replace(sampler.params, temperature=_HOTTER * (sampler.params.temperature or 1.0))
    return replace(request, sampler=sampler.fresh(prompt, hotter))


def _first_law(proposal: Proposal, b: int) -> FirstLaw:
    """A copy: a proposal may share its memory with the next one."""
    row, laws = proposal.draft_prob_rows[b][0], proposal.token_probs
    if row == CERTAIN or laws is None:
        return proposal.draft_ids[b][0]
    return TokenProbs(laws.probs[row : row + 1].clone(), None if laws.ids is None else laws.ids[row : row + 1].clone())


def _another(token: int, request: DraftRequest) -> int:
    """A wrong token, taken from the text if it has another one, because such a token is more likely to be almost right."""
    return next((t for t in reversed(request.tokens[:-1]) if t != token), token - 1 if token else 1)


# --- texts --------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """tokens: prompt and output. first_laws: by position (Record). grammar: of the request's structured_outputs. origins: of
    the output tokens. source: see TokenSequence."""

    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    first_laws: Mapping[int, FirstLaw] = {}
    grammar: Grammar | None = None
    origins: Sequence[Origin] = ()
    source: Source = NO_SOURCE

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def up_to(self, length: int) -> Text:
        """The text with only its first `length` output tokens."""
        return self._replace(tokens=self.tokens[: self.prompt_len + length])

    def rows(self) -> list[Row]:
        """One row for each output token, with its own prefix. Their sampler shares no state with the engine's: counts and the
        constraint's state start afresh."""
        prompt, output = self.tokens[: self.prompt_len], self.output_ids
        sampler = self.sampler.fresh(prompt)
        sampler.constraint = self.grammar.start(self.prompt_len) if self.grammar else None
        return [Row(sampler, prompt, output[:i]) for i in range(len(output))]


class Trial:
    """An engine like the LLM's that writes texts. control: what is broken in it, None for nothing. policy: None for the
    LLM's own. length: roughly the draft tokens of a step. script: full texts to draft from, in the order in which they are
    written (RecordedDrafter).

    Raises ForedraftError while the LLM is running requests."""

    def __init__(
        self,
        llm: LLM,
        control: Control | None,
        policy: Policy | None,
        *,
        seed: int,
        length: int,
        script: Sequence[Text] = (),
    ) -> None:
        self.record = Record()
        texts, wrong_every = {i: text.tokens for i, text in enumerate(script)}, max(3, 2 * length - 1)
        broken = control.drafter if control and control.drafter else (lambda drafter: drafter)
        drafters = {
            name: drafter if name == NO_DRAFT else RecordedDrafter(broken(drafter), self.record, texts, wrong_every)
            for name, drafter in llm.drafters.items()
        }
        target = control.target(llm.target) if control and control.target else None
        verifier = control.verifier if control else verify
        self._frontend = llm.trial(drafters, target=target, policy=policy, seed=seed, verifier=verifier)

    def take_draft_surprises(self) -> list[Tensor]:
        """The surprises recorded since the last call (Record)."""
        taken, self.record.draft_surprises = self.record.draft_surprises, []
        return taken

    def write(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Text]:
        """All texts of all prompts, prompt after prompt. Raises RequestError if one of them failed."""
        requests = [self._frontend.prepare(prompt, params) for prompt in prompts]
        self._frontend.run(requests)
        first_laws, self.record.first_laws = self.record.first_laws, {}
        return [
            Text(s.tokens, s.prompt_len, s.sampler, first_laws.get(s.seq_id, {}), request.grammar, s.origins, s.source)
            for request in requests
            for s in request.sequences
        ]


def shortened(params: SamplingParams, length: int) -> SamplingParams:
    """The same parameters for texts of at most `length` tokens, which are the first tokens of the longer texts."""
    length = min(length, params.max_tokens or length)
    return replace(params, max_tokens=length, min_tokens=min(params.min_tokens, length))


def num_tokens(texts: Sequence[Text]) -> int:
    """Output tokens of all texts."""
    return sum(len(text.output_ids) for text in texts)


def step_starts(texts: Sequence[Text]) -> list[tuple[int, FirstLaw]]:
    """-> for each drafted step with a FirstLaw: the row of its first token among the output tokens of all texts, and the FirstLaw"""
    starts, num_before = list[tuple[int, FirstLaw]](), 0
    for text in texts:
        laws = sorted((position - text.prompt_len, law) for position, law in text.first_laws.items())
        starts += [(num_before + place, law) for place, law in laws if place < len(text.output_ids)]
        num_before += len(text.output_ids)
    return starts


# --- the independent pass -----------------------------------------------------------------------------------------


def read_whole(model: LanguageModel, texts: Sequence[Text]) -> Iterator[tuple[list[Text], Tensor]]:
    """Read texts from their first token, a batch at a time, using no state of an engine. -> (the batch, the logits that
    decided its output tokens [sum of output lengths, V], text after text). Texts without output are skipped."""
    for batch in _batches([text for text in texts if text.output_ids], model.traits.vocab_size):
        cache = model.scratch_cache([len(text.tokens) for text in batch], sources=[text.source for text in batch])
        reads = [Read(i, text.tokens[:-1], len(text.output_ids)) for i, text in enumerate(batch)]
        yield batch, model.read(reads, cache)


def _batches(texts: Sequence[Text], vocab_size: int) -> Iterator[list[Text]]:
    batch: list[Text] = []
    for text in texts:
        grown = [*batch, text]
        num_rows = sum(len(text.source) + len(text.tokens) for text in grown)
        if batch and (num_rows > _MOST_ROWS or num_tokens(grown) * vocab_size > _MOST_LOGITS):
            yield batch
            grown = [text]
        batch = grown
    if batch:
        yield batch


def rows_of(texts: Sequence[Text]) -> list[Row]:
    return [row for text in texts for row in text.rows()]


def row_noise(model: LanguageModel, ids: Sequence[int], source: Source = NO_SOURCE) -> float:
    """How much a logit depends on what else is in its pass: a text read whole is compared with the same text read token by
    token. 0 if loading found rows exact, otherwise at least NEAR_TIE."""
    if model.traits.row_exact:
        return 0.0
    whole = model.read([Read(0, ids, len(ids))], model.scratch_cache([len(ids)], sources=[source]))
    cache = model.scratch_cache([len(ids)], sources=[source])
    alone = [model.read([Read(0, [token], 1)], cache)[0] for token in ids]
    differences = [float((a.float() - b.float()).abs().max()) for a, b in zip(whole, alone, strict=True)]
    return max(NEAR_TIE, *differences)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, for arithmetic in many small calls: waiting for threads makes it several times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
