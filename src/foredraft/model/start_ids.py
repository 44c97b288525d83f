"""The ids that the decoder of an encoder-decoder starts with, according to its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from foredraft.errors import ModelError
from foredraft.model.encoder_inputs import feature_shape_of


def start_ids_of(hf: PreTrainedModel, name: str) -> tuple[int, ...]:
    """The start id, and the language if the checkpoint forces one; for Whisper also the task and the id for no timestamps. () for a
    multilingual checkpoint that leaves the language open (Whisper). Raises ModelError for a checkpoint that has no start id."""
    config: Any = hf.config
    owners = (getattr(hf, "generation_config", None), config, config.get_text_config())

    def stated(field: str) -> list[int]:
        return [value for owner in owners if isinstance(value := getattr(owner, field, None), int)]

    start = [*stated("decoder_start_token_id"), *stated("bos_token_id")]
    if not start:
        raise ModelError(
            f"{name}: it does not say which token its decoder starts with: set decoder_start_token_id in its config.json"
        )
    if feature_shape_of(config) is None:
        return (start[0], *stated("forced_bos_token_id")[:1])
    prompt = [start[0], *_language_and_task(hf, name)]
    no_timestamps = stated("no_timestamps_token_id")[:1]
    known = [token for token in prompt if token is not None]
    if len(known) < len(prompt):
        return ()
    return tuple(known if known[-1:] == no_timestamps else [*known, *no_timestamps])


def _language_and_task(hf: PreTrainedModel, name: str) -> list[int | None]:
    """The ids of a Whisper checkpoint, None for a language that it leaves open: by the names in generation_config, else by
    forced_decoder_ids, as in transformers. [] for an English-only checkpoint."""
    settings: Any = hf.generation_config
    languages, tasks = (getattr(settings, field, None) or {} for field in ("lang_to_id", "task_to_id"))
    language, task = (getattr(settings, field, None) for field in ("language", "task"))
    if language is None and task is None:
        owners = (settings, hf.config)
        forced = next((ids for owner in owners if (ids := getattr(owner, "forced_decoder_ids", None))), None)
        if forced is not None:
            return [token for _, token in forced]
        if not languages:
            return []
    language_id = None if language is None else _id_of(_language_token(language), languages, name, "language")
    return [language_id, *([_id_of(task or "transcribe", tasks, name, "task")] if tasks else [])]


def _language_token(language: str) -> str:
    """language: its name, its code, or its token."""
    code = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
    return code if code.startswith("<|") else f"<|{code}|>"


def _id_of(token: str, ids: Mapping[str, int], name: str, field: str) -> int:
    if token not in ids:
        known = ", ".join(ids) or "none"
        raise ModelError(
            f"{name}: its generation_config asks for the {field} {token}, which it does not support; supported: {known}"
        )
    return ids[token]
