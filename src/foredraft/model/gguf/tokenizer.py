"""A GGUF file's tokenizer: the library builds it from the vocabulary, and this module adds what the library leaves out.

llama.cpp's llama-vocab.cpp is the source of what a pre-tokenizer's name means, which vocabularies start a text with BOS, and which tokens
end one.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft.errors import ModelError, one_line
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.sentencepiece import sentencepiece_backend

logger = logging.getLogger("foredraft")

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|END_OF_TURN_TOKEN|>",
        "<EOT>",
        "_<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
"""Tokens after which a model has nothing more to write, whatever the file's metadata say, and whatever type it gives them."""

_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""A vocabulary with all of these ends a channel with <|end|>, and the answer comes in the next one."""

_GPT2_SPLITS = frozenset(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion"))
_DIGITS_ALONE = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"))
_WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""Pre-tokenizers of vocabularies that do not split a piece which is itself a token, whatever the merges."""

_BOS_FIRST = _WHOLE_WORDS | {"chameleon"}
_SPLITS_AS = {"glm4": "llama3", "chatglm-bpe": "llama3"}
"""Names that the library does not know, and a name with the same split."""

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def end_ids(metadata: Metadata, vocab_size: int) -> list[int]:
    """The ids that end a text, the file's end-of-sequence id first."""
    named = [metadata.token_id(name, vocab_size) for name in ("eos", "eot", "eom")]
    known = {token: i for i, token in enumerate(metadata.array("tokenizer.ggml.tokens")) if token in _ENDS}
    if known.keys() >= _HARMONY_ENDS:
        known.pop("<|end|>", None)
    return list(dict.fromkeys(index for index in [*named, *known.values()] if index is not None and index < vocab_size))


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Raises ModelError for a file without a vocabulary, and for an unknown kind of tokenizer."""
    metadata = Metadata(file)
    fields = _fields(metadata)
    if not fields["tokens"] or fields["tokenizer_type"] not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise ModelError(
            f"{file.path}: no tokenizer could be built from its vocabulary of kind {fields['tokenizer_type'][:40]!r}; give "
            "tokenizer=, or token ids as prompts"
        )
    try:
        backend = _backend(metadata, fields)
        return _wrapped(metadata, fields["tokens"], backend)
    except ImportError as error:
        raise ModelError(f"{file.path}: reading its tokenizer needs a newer transformers; upgrade it") from error
    except Exception as error:  # the library's own checks of a vocabulary
        raise ModelError(f"{file.path}: no tokenizer could be built from its vocabulary: {one_line(error)}") from error


def _fields(metadata: Metadata) -> dict[str, Any]:
    """The fields of the file, as the library's builder names them."""
    fields: dict[str, Any] = {
        "tokenizer_type": metadata.text("tokenizer.ggml.model", ""),
        "pre_tokenizer_type": _SPLITS_AS.get(name := metadata.text("tokenizer.ggml.pre", "default"), name),
        "tokens": list(metadata.array("tokenizer.ggml.tokens")),
        "token_type": list(metadata.array("tokenizer.ggml.token_type", int)),
    }
    merges, scores = metadata.array("tokenizer.ggml.merges"), metadata.array("tokenizer.ggml.scores", float)
    if fields["tokenizer_type"] == _BYTE_LEVEL:
        fields["merges"] = list(merges)
    else:
        fields["scores"] = scores
    return fields


def _backend(metadata: Metadata, fields: dict[str, Any]) -> Any:
    if fields["tokenizer_type"] == _BYTE_LEVEL:
        from transformers.integrations.gguf import convert_gguf_tokenizer

        backend, _ = convert_gguf_tokenizer(metadata.architecture, fields)
        _split_as_named(backend, fields["pre_tokenizer_type"])
        return backend
    backend = sentencepiece_backend(metadata.architecture, fields)
    if not metadata.flag("tokenizer.ggml.add_space_prefix", True):
        _leave_out_space_prefix(backend)
    return backend


def _split_as_named(backend: Any, name: str) -> None:
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGITS_ALONE:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif name in _GPT2_SPLITS:
        backend.pre_tokenizer = byte_level
    elif name not in GGUF_PRE_TOKENIZER_SPLITS:
        logger.warning("the pre-tokenizer %r is unknown: texts are split as for GPT-2", name)
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True


def _leave_out_space_prefix(backend: Any) -> None:
    """Remove the prefix from Metaspace, which the library's builder uses for SentencePiece vocabularies."""
    from tokenizers import decoders, pre_tokenizers

    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer.prepend_scheme = "never"
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


def _wrapped(metadata: Metadata, tokens: list[str], backend: Any) -> PreTrainedTokenizerBase:
    ids = {name: metadata.token_id(key, len(tokens)) for name, key in _SPECIAL.items()}
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    backend.post_processor = _post_processor(metadata, special, ids)
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(backend), clean_up_tokenization_spaces=False, **special
    )
    template = metadata.text("tokenizer.chat_template", "")
    tokenizer.chat_template = template or None
    return tokenizer


class _Uncopied:
    """Replaces a backend where the library would copy it through a text of many megabytes. The backend has no other owner."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._backend


def _post_processor(metadata: Metadata, special: dict[str, str], ids: dict[str, int | None]) -> Any:
    """Add BOS before a text and EOS after it, if the file wants them."""
    from tokenizers import processors

    begins = metadata.flag("tokenizer.ggml.add_bos_token", _bos_by_default(metadata)) and "bos_token" in special
    ends = metadata.flag("tokenizer.ggml.add_eos_token", False) and "eos_token" in special
    names = {"bos_token": begins, "eos_token": ends}
    bos, eos = ([special[name]] if names[name] else [] for name in names)
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
        special_tokens=[(special[name], ids[name]) for name, is_added in names.items() if is_added],
    )


def _bos_by_default(metadata: Metadata) -> bool:
    """Whether a text starts with BOS if the file does not say."""
    if metadata.text("tokenizer.ggml.model", "") == _SENTENCEPIECE:
        return True
    return metadata.text("tokenizer.ggml.pre", "default") in _BOS_FIRST
