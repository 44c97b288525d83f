"""The methods, i.e. the drafters, that a user can choose by name or as objects. This module does not import PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

from foredraft.drafters import REGISTRY, REQUIREMENTS, SELF_DRAFTS, missing_for
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.engine.proposal import Drafter

Method: TypeAlias = Union[str, "Drafter"]
Methods: TypeAlias = Method | Sequence[Method]

NO_DRAFT = "none"

MERGED = "merged"
"""The drafter that merges the trees of several others. Users cannot choose it; it is added if several methods grow trees."""

HYBRID = "hybrid"
"""The drafter that asks a lookup first and a model elsewhere. Users cannot choose it either; it is added for "auto"."""

LOOKUPS = ("suffix", "ngram")
"""The methods that look drafts up in the text."""

EARLY_EXIT = "early_exit"

REMOTE = "remote"
"""The method that drafts on a draft server."""

DRAFT_METHODS = frozenset(REQUIREMENTS.keys() - {REMOTE})
"""The methods that draft with the model or head given as draft_model=."""

ADAPTING_METHODS = ("medusa",)
"""The methods whose drafters can learn from the texts."""

LANGUAGE_MODEL_METHODS = frozenset({"draft_model", "pard"})
"""The DRAFT_METHODS whose draft is a separate language model."""

HEAD_METHODS = DRAFT_METHODS - LANGUAGE_MODEL_METHODS
"""The DRAFT_METHODS that draft with a head or an early exit."""

TARGET_HEADS = frozenset({"mtp"})
"""Methods that draft with a head in the target's own checkpoint."""

OWN_DRAFTS = frozenset({*SELF_DRAFTS, *TARGET_HEADS})
"""Methods whose draft comes with the target."""


def choose_methods(
    methods: Methods | None,
    *,
    has_draft_model: bool,
    draft_method: str = "draft_model",
    has_exit_layer: bool = False,
    has_draft_server: bool = False,
) -> list[Method]:
    """-> the drafters as a list of names and objects

    methods: one, several, or names with "+" between them; None: draft_method with a draft model, else "early_exit" with an exit layer;
    "remote" too with a draft server; "suffix" without any of these. draft_method: the method that uses the draft model, see
    DRAFT_METHODS.

    Raises ForedraftError for an unknown name, an object that is not a drafter, a draft model that is missing or unused, and a missing
    draft server.
    """
    if methods is None:
        found = [draft_method] if has_draft_model else [EARLY_EXIT] if has_exit_layer else []
        return [*found, *([REMOTE] if has_draft_server else [])] or ["suffix"]
    chosen, names = _listed(methods), names_of(methods)
    if not chosen or len(set(names)) < len(names):
        raise ForedraftError(f"method must name at least one drafter, and each only once, not {names}")
    if NO_DRAFT in names and len(names) > 1:
        raise ForedraftError('method "none" cannot be combined: a choice among drafters always includes it')
    for method in chosen:
        if not isinstance(method, str):
            _check_drafter(method)
        elif method not in REGISTRY:
            raise ForedraftError(f"unknown method {method!r}: {_hint_for(method)}")
    if REMOTE in names and not has_draft_server:
        raise missing_for(REMOTE)
    given = {EARLY_EXIT} if has_exit_layer else set()
    needing = next((name for name in names if name in DRAFT_METHODS and name not in given), None)
    if needing is not None and not has_draft_model:
        raise missing_for(needing)
    if has_draft_model and draft_method in HEAD_METHODS:
        unfit = next((name for name in names if name in HEAD_METHODS and name not in given | {draft_method}), None)
        if unfit is not None:
            raise ForedraftError(f'method "{unfit}" cannot draft with this head: use method "{draft_method}"')
    if has_draft_model and all(name in OWN_DRAFTS for name in names):
        raise ForedraftError(f'method "{names[0]}" makes its draft from the target: leave draft_model out')
    own = next((name for name in names if name in TARGET_HEADS), None)
    if own is not None and any(name in HEAD_METHODS for name in names):
        raise ForedraftError(f'method "{own}" cannot be combined with another head: leave one of them out')
    return chosen


def check_exit_layer(exit_layer: int | None, names: Sequence[str], draft_method: str) -> None:
    """Raises ForedraftError for an exit_layer that none of these methods uses, or that is combined with a head."""
    if exit_layer is not None and EARLY_EXIT not in names:
        raise ForedraftError(f'exit_layer is for the method "early_exit", but the method is "{"+".join(names)}"')
    if exit_layer is not None and draft_method not in LANGUAGE_MODEL_METHODS:
        raise ForedraftError("exit_layer and a head cannot be combined: leave one of them out")


def check_draft_server(names: Sequence[str], *, is_given: bool) -> None:
    """Raises ForedraftError for a draft server that none of these methods uses."""
    if is_given and REMOTE not in names:
        raise ForedraftError(f'draft_server is for the method "{REMOTE}", but the method is "{"+".join(names)}"')


def check_adapt(names: Sequence[str], *, adapt: bool) -> None:
    """Raises ForedraftError if adapt is set and none of these methods can adapt."""
    if adapt and not any(name in ADAPTING_METHODS for name in names):
        raise ForedraftError(
            f'adapt is for the method {" and ".join(ADAPTING_METHODS)}, but "{"+".join(names)}" has nothing that adapts'
        )


def _hint_for(method: str) -> str:
    if method.removeprefix("eagle") in ("1", "2", "3"):
        return 'use "eagle", which reads heads of EAGLE-1, 2 and 3'
    if method.endswith("_mtp"):
        return 'use "mtp", which reads the MTP layers of any checkpoint'
    return f"known methods are {', '.join(sorted(REGISTRY))}, and objects with propose and forget"


def _check_drafter(method: Drafter) -> None:
    from foredraft.engine.contract import check_drafter  # imports PyTorch, as whoever made the drafter has already done

    check_drafter(method)


def _listed(methods: Methods) -> list[Method]:
    if isinstance(methods, str):
        return [*methods.split("+")]
    return [*methods] if isinstance(methods, Sequence) else [methods]


def names_of(methods: Methods) -> list[str]:
    """The names of the methods. methods: as in choose_methods."""
    return [name_of(method) for method in _listed(methods)]


def name_of(method: Method) -> str:
    """The name of a method; for an object, that of its class."""
    return method if isinstance(method, str) else type(method).__name__


def draft_of(method: Method) -> str:
    """The key of a method's draft model, if it uses one: its own name for a copy of the target, else "draft_model"."""
    name = name_of(method)
    return name if name in SELF_DRAFTS else "draft_model"
