"""The tokens that two vocabularies have in common: token-level intersection (TLI, arXiv:2502.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.errors import VocabularyError
from foredraft.vocabulary.byte_vocabulary import ByteVocabulary
from foredraft.vocabulary.pair import VocabularyPair


class SharedIds:
    """Ids with equal bytes, and special tokens with the same role or text, one to one.

    target_ids, draft_ids: [N] int64; entry i of one corresponds to entry i of the other. Raises VocabularyError if there are none.
    """

    def __init__(self, pair: VocabularyPair, draft_width: int, target_width: int) -> None:
        """draft_width, target_width: widths of the logits."""
        ours, theirs = _ids_by_bytes(pair.target), _ids_by_bytes(pair.draft)
        shared = {index: ours[part] for part, index in theirs.items() if part in ours}
        shared |= pair.special_to_target
        pairs = sorted(
            {target: draft for draft, target in shared.items() if draft < draft_width and target < target_width}.items()
        )
        if not pairs:
            raise VocabularyError("the draft model's vocabulary shares no token with the target's: use another draft")
        self.target_ids, self.draft_ids = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        self._to_draft = dict(pairs)
        self._target_width = target_width
        self._on_device = (self.target_ids, self.draft_ids)

    def to_draft(self, target_id: int) -> int:
        """The draft's id for a target id, which must be shared."""
        return self._to_draft[target_id]

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids, of which only the shared ones can be drawn. Their softmax is the draft's own distribution
        conditioned on a shared token. [R, V draft] -> [R, target_width]"""
        out = logits.new_full((logits.shape[0], self._target_width), -torch.inf)
        if self._on_device[0].device != logits.device:
            self._on_device = (self.target_ids.to(logits.device), self.draft_ids.to(logits.device))
        target_ids, draft_ids = self._on_device
        return out.index_copy_(1, target_ids, logits.index_select(1, draft_ids))


def _ids_by_bytes(vocabulary: ByteVocabulary) -> dict[bytes, int]:
    """The id for each byte string. If several ids have the same bytes, it is the one that texts are encoded with: a byte token is the
    last resort."""
    single = set(vocabulary.single_byte_ids.values())
    found: dict[bytes, int] = {}
    for index, part in enumerate(vocabulary.bytes_of):
        if part and (part not in found or found[part] in single):
            found[part] = index
    return found
