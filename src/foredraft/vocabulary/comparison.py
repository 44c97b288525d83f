"""Check whether a draft model has the target's vocabulary, and if not, say what differs."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from foredraft.errors import VocabularyError

_SPECIAL = ("bos_token_id", "eos_token_id", "unk_token_id")


def check_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise VocabularyError if the vocabularies differ, with their sizes, the first token that differs, and the special tokens that
    differ.

    Logits may be wider than the vocabulary (152,064 for 151,936 tokens): padding is not a difference.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    differences = []
    if len(ours) != len(theirs):
        differences.append(f"{len(theirs)} tokens instead of {len(ours)}")
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            differences.append(
                f"token {token_id} is {theirs.get(token_id)!r} in the draft but {ours.get(token_id)!r} in the target"
            )
            break
    for name in _SPECIAL:
        if differences and getattr(target, name, None) != getattr(draft, name, None):
            differences.append(f"{name} is {getattr(draft, name, None)} instead of {getattr(target, name, None)}")
    if differences:
        raise VocabularyError(
            f"the draft model's vocabulary differs from the target's: {'; '.join(differences)}; "
            "use a draft with the target's tokenizer"
        )


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
