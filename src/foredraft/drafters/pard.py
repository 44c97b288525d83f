"""A draft model that drafts all tokens in one pass (PARD, arXiv:2504.18583).

After the pending token it reads a mask token for each further place. The row of the pending token gives the first draft token, as in
any language model, and the row of the i-th mask token gives the one after i others. No place sees the token drafted at another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal
from foredraft.drafters._histories import HistoryReader
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._slots import draft_slots, num_places, slots_of
from foredraft.drafters.context import DrafterContext
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel, Read
from foredraft.sampling import TokenProbs


class PardDrafter(HistoryReader):
    """Greedy and seeded requests get certain draft tokens, the others sampled ones with their probabilities.

    mask_token: the id that the model was trained to read at places that are not written yet. Its keys and values are forgotten
    in the next step.
    """

    grows_trees = True

    def __init__(
        self, model: LanguageModel, mask_token: int, vocab_size: int, pool: MemoryPool, max_rows: int = 512
    ) -> None:
        super().__init__(model, vocab_size, pool, max_rows)
        self._mask_token = mask_token

    @classmethod
    def build(cls, context: DrafterContext) -> PardDrafter:
        model = context.draft_model
        if model is None or model.mask_token is None:
            raise missing_for("pard")
        if context.vocabularies is not None:
            raise ForedraftError(
                f'method "pard" needs a draft model with the target\'s vocabulary, and {model.traits.name} has another: '
                'use method="draft_model" with it'
            )
        if model.mask_token >= model.traits.vocab_size:
            raise ForedraftError(
                f"{model.traits.name}: its mask token is {model.mask_token}, but it has only {model.traits.vocab_size} ids; its "
                "config.json and its weights disagree"
            )
        return cls(model, model.mask_token, context.vocab_size, context.pool, context.max_rows)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [self._draft_for(request) for request in requests]
        token_probs: list[TokenProbs] = []
        for group in self._passes(self._catch_up([draft for draft in drafts if draft.max_len > 0])):
            with torch.inference_mode():
                draft_slots(slots_of(group), self._read(group), self._vocab_size, token_probs)
        return as_proposal(drafts, token_probs)

    def _read(self, drafts: Sequence[Draft]) -> Tensor:
        """[R, V'], a row for each place of these drafts"""
        reads = []
        for draft in drafts:
            tokens, count = self._rest(draft).tokens, num_places(draft)
            masks = [self._mask_token] * (count - 1)
            reads.append(Read(draft.request.seq_id, [*tokens, *masks], count))
        return self._model.read(reads, self._cache)

    def _num_rows(self, draft: Draft) -> int:
        return super()._num_rows(draft) + num_places(draft) - 1
