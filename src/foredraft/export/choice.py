"""The target and drafter to run on another engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.engine.embedded_models import with_embedded_models
from foredraft.engine.methods import NO_DRAFT, choose_methods
from foredraft.errors import ForedraftError
from foredraft.model.checkpoint import is_gguf, raw_config
from foredraft.sampling import AUTO

if TYPE_CHECKING:
    from foredraft.heads import HeadCheckpoint
    from foredraft.settings import Settings

HEAD_METHODS = ("eagle", "medusa")
MOST_DRAFT_TOKENS = 8
"""The most tokens that "auto" drafts if max_speculative_tokens is not set, as for LLM."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A target and how to draft for it.

    target, draft: hub ids or paths; draft is a draft model, a head or None. methods: names of REGISTRY; () is plain decoding.
    speculative_tokens: γ, a number above 0 or "auto"; 0 for plain decoding. most_tokens: the most that "auto" drafts. head: the
    checkpoint that `draft` names, once it is loaded for a method that needs a head. quantization, draft_quantization: as foredraft applies them while loading.
    """

    target: str
    draft: str | None = None
    methods: tuple[str, ...] = ()
    speculative_tokens: int | str = 0
    most_tokens: int = MOST_DRAFT_TOKENS
    exit_layer: int | None = None
    head: HeadCheckpoint | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    has_trees: bool = False

    @property
    def draft_model(self) -> str:
        """`draft`, for a method that needs it. Raises ForedraftError if it is None."""
        if self.draft is None:
            raise ForedraftError(f'method "{self.method}" needs a draft model or head: give --draft-model')
        return self.draft

    @property
    def method(self) -> str:
        """The methods as `--method` takes them."""
        return "+".join(self.methods) or NO_DRAFT

    @property
    def is_auto(self) -> bool:
        return self.speculative_tokens == AUTO

    @property
    def vocab_sizes(self) -> tuple[int, int] | None:
        """The vocabulary sizes of target and draft; None unless the configurations of both are local."""
        sizes = [_vocab_size(raw_config(name)) for name in (self.target, self.draft) if name is not None]
        return (sizes[0], sizes[1]) if len(sizes) == 2 and sizes[0] and sizes[1] else None


def choice_of(settings: Settings) -> Choice:
    """The choice that the settings make.

    Raises ForedraftError for settings that LLM would refuse too, and for a tree of a fixed shape and head_settings, which cannot be
    exported.
    """
    tree = settings.speculative_token_tree
    if tree is not None and not isinstance(tree, str):
        raise ForedraftError(
            "a tree of a fixed shape cannot be exported: give --speculative-token-tree none and --speculative-tokens"
        )
    if settings.head_settings is not None:
        raise ForedraftError(
            "head_settings cannot be exported: other engines read the head's files; set them in its config.json"
        )
    settings = with_embedded_models(settings)
    target = str(settings.model)
    draft = None if settings.draft_model is None else str(settings.draft_model)
    methods = _methods(settings, draft)
    tokens: int | str = AUTO if settings.speculative_tokens is None else settings.speculative_tokens
    if NO_DRAFT in methods or tokens == 0:
        return Choice(target, quantization=settings.quantization)
    return Choice(
        target,
        draft,
        methods,
        tokens,
        MOST_DRAFT_TOKENS if settings.max_speculative_tokens is None else settings.max_speculative_tokens,
        settings.exit_layer,
        quantization=settings.quantization,
        draft_quantization=settings.draft_quantization,
        has_trees=tree == AUTO,
    )


def with_loaded_head(choice: Choice) -> Choice:
    """The choice with the head that its method needs. Raises ModelError, in one line, for a target or head that cannot be read."""
    draft = choice.draft
    if draft is None or choice.head is not None or not any(method in HEAD_METHODS for method in choice.methods):
        return choice
    return replace(choice, head=head_of(choice.target, draft))


def is_gguf_name(name: str) -> bool:
    """Whether the name is that of a GGUF file, by its suffix or its contents."""
    return name.endswith(".gguf") or is_gguf(Path(name))


def is_encoder_decoder(name: str) -> bool:
    """Whether the configuration says so, where it is local."""
    return bool(raw_config(name).get("is_encoder_decoder"))


def _methods(settings: Settings, draft: str | None) -> tuple[str, ...]:
    has_exit_layer = settings.exit_layer is not None
    draft_method = "draft_model"
    if draft is not None and settings.method is None:
        from foredraft.engine.models import draft_method_of

        draft_method = draft_method_of(draft, settings.method, None, settings.exit_layer)
    chosen = choose_methods(
        settings.method,
        has_draft_model=draft is not None,
        draft_method=draft_method,
        has_exit_layer=has_exit_layer,
        has_draft_server=settings.draft_server is not None,
    )
    return tuple(str(method) for method in chosen)


def head_of(target: str, name: str) -> HeadCheckpoint:
    """Load the head of this name, and check it against the target's shape. Raises ModelError for a target or head that cannot be read."""
    from foredraft.heads import TargetShape, load_head
    from foredraft.model import LoadOptions
    from foredraft.model.loading import load_config

    return load_head(name, TargetShape.of(load_config(target, LoadOptions())))


def _vocab_size(config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", 0))
    return size if isinstance(size, int) else 0
