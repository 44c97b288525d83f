"""Which methods can draft without the target in their process. Nothing here imports PyTorch."""

from __future__ import annotations

from foredraft.drafters import SELF_DRAFTS
from foredraft.engine.methods import HEAD_METHODS, NO_DRAFT, REMOTE, choose_methods
from foredraft.errors import ForedraftError


def check_method(method: str | None, *, has_draft_model: bool) -> None:
    """Raises ForedraftError, with the reason, for a method that cannot draft without the target in its process."""
    if method is None:
        return
    if "+" in method:
        raise ForedraftError(
            f"a draft server uses one method, not {method}: start one server for each, or combine it with local methods, as in suffix+{REMOTE}"
        )
    if method in SELF_DRAFTS:
        raise ForedraftError(
            f"{method} copies the target, which is not in this process: give --draft-model TARGET --quantization {SELF_DRAFTS[method]['quantization']}"
        )
    if method in HEAD_METHODS:
        raise ForedraftError(
            f"{method} drafts from what the target computed, which is in the target's process: use this drafter there, with --method {method}"
        )
    if method in (NO_DRAFT, REMOTE):
        raise ForedraftError(f"a draft server drafts by itself, but method {method} cannot")
    choose_methods(method, has_draft_model=has_draft_model)
