"""The models of an engine: a target, its draft models by name or its head, and the tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.drafters import SELF_DRAFTS
from foredraft.engine.methods import (
    DRAFT_METHODS,
    EARLY_EXIT,
    LANGUAGE_MODEL_METHODS,
    TARGET_HEADS,
    Method,
    Methods,
    draft_of,
    name_of,
    names_of,
)
from foredraft.errors import ForedraftError, ModelError, VocabularyError
from foredraft.heads import (
    TEXT,
    AnyHead,
    CompiledEagle,
    EarlyExit,
    HeadOptions,
    MtpHead,
    attach_head,
    attach_mtp,
    head_method_of,
)
from foredraft.heads.decoder_draft import is_decoder_draft, load_decoder_draft
from foredraft.heads.head_format import FORMAT_NAMES, NOT_ROUNDED, ROUNDED, HeadFormat
from foredraft.heads.module import HeadModule
from foredraft.kernels import quantize_int4, quantize_int8
from foredraft.model import (
    LanguageModel,
    LoadOptions,
    WarmUpSizes,
    examine,
    is_stored_in_few_bits,
    load_model,
    load_tokenizer,
)
from foredraft.model.encoder_inputs import FeatureShape
from foredraft.model.hub import config_of
from foredraft.model.mask_token import mask_token_of
from foredraft.sampling import AUTO, not_honoured
from foredraft.utils.arguments import FOUR_BITS, check_name
from foredraft.utils.machine import this_machine
from foredraft.vocabulary import VocabularyPair, pair_of

logger = logging.getLogger("foredraft")

ModelSource: TypeAlias = str | os.PathLike[str] | PreTrainedModel
"""A hub id, a directory, a GGUF file, or a loaded transformers model."""

_MAX_PADDING = 512


class HeadIdentity(NamedTuple):
    """What reports say about a head. quantization: of its matrices, if they are rounded."""

    name: str
    dtype: str
    quantization: str | None


class LoadedModels:
    """A target and its drafts, loaded. `drafts` holds draft models, by `draft_of` of the methods that use them; `head` is the head
    that drafts in place of one, or None.

    source, draft_source: the target and the draft; draft_source may be None. draft_method: the method that uses draft_source.
    tokenizer: None for the checkpoint's own. options: for the target. draft_quantization: the quantization of drafts; None takes
    the target's. head_options: for a head. exit_layer: the layer after which an untrained early exit drafts; None: no early exit.
    heterogeneous_vocab: how to use a draft model with another vocabulary, see LLM. `vocabularies` holds, by the same names as
    `drafts`, the vocabulary pairs of drafts whose vocabulary differs from the target's.

    Raises ForedraftError for models that cannot be loaded, or whose vocabularies cannot be used together.
    """

    def __init__(
        self,
        source: ModelSource,
        draft_source: ModelSource | None,
        tokenizer: str | PreTrainedTokenizerBase | None,
        options: LoadOptions,
        draft_quantization: str | None,
        draft_method: str = "draft_model",
        head_options: HeadOptions | None = None,
        exit_layer: int | None = None,
        heterogeneous_vocab: str = AUTO,
    ) -> None:
        has_head = draft_source is not None and draft_method not in LANGUAGE_MODEL_METHODS
        draft_model = None if has_head else draft_source
        takes_options = has_head or draft_method in TARGET_HEADS
        if not takes_options and head_options is not None and head_options.are_given:
            raise ForedraftError(
                "head_window and head_settings are for heads: set draft_model= to the directory or hub id of one"
            )
        self.head_options = head_options or HeadOptions()
        self.source = source
        self.options = options
        self._draft_quantization = draft_quantization
        self.draft_options = options_of_draft(draft_model, options, draft_quantization)
        # refuse an unusable draft before the target's weights are loaded
        for each, its_options in ((source, options), (draft_model, self.draft_options)):
            if each is not None and not isinstance(each, PreTrainedModel) and not _shares_encoder(each, its_options):
                examine(each, its_options)
        # before the weights, so that the memory for building it is free again when they are loaded
        self.tokenizer = _load_tokenizer(source, tokenizer, options)
        self.target = load_model(source, options)
        self._say_what_is_not_honoured()
        self.drafts: dict[str, LanguageModel] = {}
        self.vocabularies: dict[str, VocabularyPair] = {}
        self.heterogeneous_vocab = heterogeneous_vocab
        self.head: AnyHead | None = None
        self.head_identity: HeadIdentity | None = None
        if draft_model is not None:
            self.drafts["draft_model"] = self._load_draft(draft_model, self.draft_options)
        _take_over(source, self.target)
        if draft_model is not None:
            _take_over(draft_model, self.drafts["draft_model"])
        if has_head or exit_layer is not None:
            check_can_have_head(self.target)
        if has_head:
            self.head = self._attach_head(draft_source)
            self.head_identity = _identity_of(self.head, os.fspath(draft_source))  # type: ignore[arg-type]
        elif exit_layer is not None:
            self.head = EarlyExit.after(self.target, exit_layer)

    def _say_what_is_not_honoured(self) -> None:
        ignored = not_honoured(self.sampling_defaults)
        if ignored:
            logger.warning(
                "%s: its generation_config sets %s, which is not supported: texts are generated token by token, without beams or "
                "timestamps",
                self.target.traits.name,
                ", ".join(ignored),
            )

    @property
    def is_in_memory(self) -> bool:
        """Whether the target was given as a model object, which belongs to the caller."""
        return isinstance(self.source, PreTrainedModel)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model or a head given in its place."""
        return "draft_model" in self.drafts or (self.head is not None and not self.has_own_head)

    @property
    def has_exit_layer(self) -> bool:
        """Whether an untrained early exit can draft."""
        return isinstance(self.head, EarlyExit) and not self.head.config.is_trained

    @property
    def has_own_head(self) -> bool:
        """Whether the head came with the target, and was not given as draft_model."""
        return self.has_exit_layer or isinstance(self.head, MtpHead)

    @property
    def end_ids(self) -> list[int]:
        """The end-of-sequence ids of generation_config, else of the model's configuration, else of the tokenizer."""
        config = getattr(self.target.hf, "generation_config", None)
        for owner in (config, self.target.hf.config.get_text_config(), self.tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
        return []

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The values that the checkpoint's generation_config sets."""
        config = getattr(self.target.hf, "generation_config", None)
        return {} if config is None else config.to_diff_dict()

    def load_own_drafts(self, methods: Sequence[Method]) -> None:
        """Load the drafts that these methods make from the target, unless they are loaded: its MTP layers, and copies of it."""
        for method in methods:
            name = name_of(method)
            if name in TARGET_HEADS and not isinstance(self.head, MtpHead):
                self._attach_mtp()
            if name in SELF_DRAFTS and name not in self.drafts:
                if is_stored_in_few_bits(self.source, self.options):
                    raise ModelError(
                        f"{name} drafts with a rounded copy of the target, but this target is already quantized; use another "
                        "method, or give the unquantized checkpoint"
                    )
                draft = self._load_draft(self.source, replace(_on_one_device(self.options), **SELF_DRAFTS[name]))
                _take_over(self.source, draft)
                self.drafts[name] = draft

    def warm_up(self, num_sequences: int, max_draft: int) -> None:
        """Let the models allocate what they need for steps of this size, before the rest of the memory becomes cache."""
        vocab_size = self.target.traits.vocab_size
        taps = () if self.head is None else self.head.config.taps
        self.target.warm_up(
            WarmUpSizes(num_sequences, max_draft + 1, vocab_size, drafts=False, taps=tuple(sorted(taps)))
        )
        for name, draft in self.drafts.items():
            width = draft.traits.vocab_size if name in self.vocabularies else vocab_size
            # a draft model with mask tokens reads the newly accepted tokens and drafts all tokens in one pass
            sizes = (max_draft, True) if draft.mask_token is None else (2 * max_draft, False)
            draft.warm_up(WarmUpSizes(num_sequences, sizes[0], width, drafts=sizes[1]))

    def draft_for(self, method: Method) -> LanguageModel | None:
        return self.drafts.get(draft_of(method))

    def state_key(self, methods: Sequence[Method], drafters: Sequence[str]) -> dict[str, object]:
        """The key of the controller's stored state: everything that the cost of a step depends on, except the texts and the load."""
        models = {"target": (self.target, self.options), "draft": (self.draft_for(methods[0]), self.draft_options)}
        return {
            "machine": asdict(this_machine()),
            "drafters": list(drafters),
            **{f"{name} vocabulary": pair.method for name, pair in self.vocabularies.items()},
            **(
                {}
                if self.head is None
                else {"head": repr((self.head.config, self.head_options.window, self.head_identity))}
            ),
            **{
                role: (model.traits, options, type(model.body).__name__)
                for role, (model, options) in models.items()
                if model is not None
            },
        }

    def _load_draft(self, source: ModelSource, options: LoadOptions) -> LanguageModel:
        """Load a draft model. If both models have a tokenizer, their vocabularies are compared before the weights are loaded."""
        if _shares_encoder(source, options):
            return load_decoder_draft(os.fspath(source), self.target, options.revision, self._head_format().small)
        if self.tokenizer is None or isinstance(source, PreTrainedModel):
            draft = load_model(source, options)
            check_logit_width(self.target, draft)
        else:
            pair = pair_of(self.tokenizer, load_tokenizer(source, options), self.heterogeneous_vocab)
            if pair is not None:
                logger.info("%s: %s; set heterogeneous_vocab to change that", os.fspath(source), pair)
                self.vocabularies["draft_model"] = pair
            draft = load_model(source, options)
        check_encoders(self.target, draft, self.vocabularies.get("draft_model"))
        return draft

    def _attach_mtp(self) -> None:
        """Load the target's MTP layers. Raises ModelError for a target without them, and if there is another head."""
        if self.head is not None:
            raise ModelError('method "mtp" cannot be combined with another head: load the target without it')
        if self.is_in_memory:
            raise ModelError(
                'method "mtp" reads MTP layers from the target\'s checkpoint: give its directory or hub id, not a model object'
            )
        check_can_have_head(self.target)
        name = os.fspath(self.source)
        self.head = attach_mtp(name, self.target, self.options.revision, self.head_options)
        self.head_identity = HeadIdentity(f"MTP layers of {name}", str(self.head.dtype).removeprefix("torch."), None)

    def _attach_head(self, source: ModelSource | None) -> AnyHead:
        if source is None or isinstance(source, PreTrainedModel):
            raise ModelError("a head must be given by its directory or hub id, not as a model object")
        options, text = self.draft_options, [] if self.tokenizer is None else self.tokenizer.encode(TEXT)
        return attach_head(
            os.fspath(source), self.target, options.revision, self.head_options, self._head_format(), text
        )

    def _head_format(self) -> HeadFormat:
        return head_format(self.source, self.options, self._draft_quantization)


def _shares_encoder(source: ModelSource, options: LoadOptions) -> bool:
    """Whether the draft is a decoder that uses the target's encoder."""
    return not isinstance(source, PreTrainedModel) and is_decoder_draft(os.fspath(source), options.revision)


def options_of_draft(source: ModelSource | None, options: LoadOptions, draft_quantization: str | None) -> LoadOptions:
    """The target's options on one device, with the draft's quantization. A checkpoint that is quantized already inherits none from the
    target; if one is requested for the draft itself, the loader refuses it."""
    options = _on_one_device(options)
    if draft_quantization is not None:
        return replace(options, quantization=draft_quantization)
    if options.is_rounded and source is not None and is_stored_in_few_bits(source, options):
        return replace(options, quantization=None)
    return options


def _on_one_device(options: LoadOptions) -> LoadOptions:
    """The options without device_map and tp_plan: drafts are small, so each is on one device and in one process."""
    return replace(options, device_map=None, tp_plan=None)


def head_format(target: ModelSource, options: LoadOptions, draft_quantization: str | None = None) -> HeadFormat:
    """The format of a head's matrices. options: the target's. By default the head of a target that is rounded, or stored in few bits, is
    rounded too."""
    if draft_quantization is None:
        return ROUNDED if options.is_rounded or is_stored_in_few_bits(target, options) else NOT_ROUNDED
    if draft_quantization in FOUR_BITS:
        return HeadFormat.same(quantize_int4)
    return HeadFormat.same(quantize_int8) if draft_quantization == "int8" else NOT_ROUNDED


def draft_method_of(
    draft_source: ModelSource | None, methods: Methods | None, revision: str | None, exit_layer: int | None = None
) -> str:
    """The method that uses a draft: the one that the user names, else the one that the draft's files are made for. With exit_layer,
    early exit needs no draft. Without a draft, the result may be a method whose head is in the target's checkpoint."""
    using = DRAFT_METHODS - ({EARLY_EXIT} if exit_layer is not None else set())
    named = [] if methods is None else [name for name in names_of(methods) if name in using]
    if not named and methods is not None and draft_source is None:
        named = [name for name in names_of(methods) if name in TARGET_HEADS]
    if named or draft_source is None or isinstance(draft_source, PreTrainedModel):
        return named[0] if named else "draft_model"
    name = os.fspath(draft_source)
    method = head_method_of(name, revision)
    return method or ("draft_model" if mask_token_of(config_of(name, revision)) is None else "pard")


def _identity_of(head: AnyHead, name: str) -> HeadIdentity:
    weight_format = head.weight_format if isinstance(head, CompiledEagle | HeadModule) else None
    quantization = None if weight_format is None else FORMAT_NAMES.get(weight_format)
    return HeadIdentity(name, str(head.dtype).removeprefix("torch."), quantization)


def check_logit_width(target: LanguageModel, draft: LanguageModel) -> None:
    """Raises VocabularyError if the widths of the logits differ by more than padding can explain. For models without tokenizers,
    whose vocabularies cannot be compared."""
    if abs(draft.traits.vocab_size - target.traits.vocab_size) > _MAX_PADDING:
        raise VocabularyError(
            f"the draft model's logits are {draft.traits.vocab_size} wide, but the target's are {target.traits.vocab_size} wide: "
            "use a draft model with the target's vocabulary"
        )


def check_encoders(target: LanguageModel, draft: LanguageModel, vocabularies: VocabularyPair | None = None) -> None:
    """Raises ModelError if a draft's encoder would have nothing to read, or other inputs than the target's, and if the draft would read
    the source or the decoder's start in ids of another vocabulary. A draft without an encoder reads only the generated text.
    vocabularies: None if they are the same."""
    if draft.has_encoder and not target.has_encoder:
        raise ModelError(
            f"{draft.traits.name} is an encoder-decoder, but {target.traits.name} is not: the draft's encoder "
            "would have nothing to read"
        )
    ours, theirs = draft.traits.feature_shape, target.traits.feature_shape
    if draft.has_encoder and ours != theirs:
        raise ModelError(
            f"the encoder of {draft.traits.name} reads {_what_is_read(ours)}, but that of {target.traits.name} reads "
            f"{_what_is_read(theirs)}: a draft model must read the same sources as the target"
        )
    if target.has_encoder and vocabularies is not None:
        raise ModelError(
            f"{draft.traits.name} has a different vocabulary from {target.traits.name}, an encoder-decoder: its "
            "draft model must have the target's vocabulary"
        )


def _what_is_read(shape: FeatureShape | None) -> str:
    return "text" if shape is None else f"features of shape {list(shape)}"


def check_can_have_head(target: LanguageModel) -> None:
    """Raises ModelError for a target that heads and early exits cannot draft for."""
    if not target.is_whole:
        raise ModelError(
            f"{target.traits.name} is split over several devices, but heads and early exits use weights of their target on one "
            'device: use a draft model, or method="suffix" or "ngram"'
        )
    check_decoder_only(target)


def check_decoder_only(target: LanguageModel) -> None:
    """Raises ModelError for a target that heads, early exits and draft servers cannot draft for."""
    if target.has_encoder:
        raise ModelError(
            f"{target.traits.name} is an encoder-decoder: heads, early exits and draft servers draft only for decoder-only models; use "
            'an encoder-decoder as draft_model, or method="suffix" or "ngram"'
        )


def _take_over(source: ModelSource, model: LanguageModel) -> None:
    """Let the model own its weights, unless they belong to the caller."""
    if not isinstance(source, PreTrainedModel):
        model.take_over()


def _load_tokenizer(
    source: ModelSource, tokenizer: str | PreTrainedTokenizerBase | None, options: LoadOptions
) -> PreTrainedTokenizerBase | None:
    """The given tokenizer, else the checkpoint's own. None, with a warning, if it has none; a model in memory needs none."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is not None:
        check_name("tokenizer", tokenizer, or_object=PreTrainedTokenizerBase)
        return load_tokenizer(tokenizer, options)
    if isinstance(source, PreTrainedModel):
        return None
    try:
        return load_tokenizer(source, options)
    except ModelError as error:
        logger.warning("%s", error)
        return None
