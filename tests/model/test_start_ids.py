"""The decoder's start tokens; for Whisper's checkpoints they are those of transformers' generate."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.errors import ModelError
from foredraft.model.start_ids import start_ids_of
from tests.model.zoo import ENCODER_DECODERS, WHISPER, random_model, sound

LANGUAGES = {"<|en|>": 70, "<|de|>": 71}
TASKS = {"transcribe": 75, "translate": 76}
MANY = {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "is_multilingual": True, "no_timestamps_token_id": 80}

ENGLISH = {"no_timestamps_token_id": 80, "is_multilingual": False}

SETTINGS: dict[str, dict[str, Any]] = {
    "English alone": ENGLISH,
    "English alone, forced": {**ENGLISH, "forced_decoder_ids": [[1, 80]]},
    "a language by its code": {**MANY, "language": "de"},
    "a language by its name": {**MANY, "language": "German", "task": "translate"},
    "a language by its token": {**MANY, "language": "<|en|>"},
    "forced": {**MANY, "forced_decoder_ids": [[1, 71], [2, 76]]},
    "forced whole": {**MANY, "forced_decoder_ids": [[1, 71], [2, 76], [3, 80]]},
    "a language in the place of what is forced": {**MANY, "forced_decoder_ids": [[1, None], [2, 75]], "language": "en"},
}


def whisper(settings: dict[str, Any]) -> Any:
    hf = random_model(WHISPER.config())
    for name, value in settings.items():
        setattr(hf.generation_config, name, value)
    return hf


@pytest.mark.parametrize("name", SETTINGS)
def test_whispers_start_ids_are_those_of_generate(name: str) -> None:
    hf = whisper(SETTINGS[name])
    out = hf.generate(sound((1, 16, 80), 0), max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    assert start_ids_of(hf, "w") == tuple(out.sequences[0].tolist()[:-1])


@pytest.mark.parametrize("settings", [{}, {"task": "translate"}, {"forced_decoder_ids": [[1, None], [2, 75]]}])
def test_without_a_language_the_request_must_give_the_start_ids(settings: dict[str, Any]) -> None:
    assert start_ids_of(whisper({**MANY, **settings}), "w") == ()


def test_an_unknown_language_or_task_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match=r"w: its generation_config asks for the language <\|fr\|>, which it does not support; supported: <\|en\|>, <\|de\|>",
    ):
        start_ids_of(whisper({**MANY, "language": "french"}), "w")
    with pytest.raises(ModelError, match="the task sing, which it does not support; supported: transcribe, translate"):
        start_ids_of(whisper({**MANY, "language": "en", "task": "sing"}), "w")
    with pytest.raises(ModelError, match=r"the language <\|de\|>, which it does not support; supported: none"):
        start_ids_of(whisper({**ENGLISH, "language": "de"}), "w")


def test_other_models_begin_with_a_start_id_and_a_forced_one() -> None:
    hf = random_model(ENCODER_DECODERS["bart"].config())
    assert start_ids_of(hf, "b") == (2,)
    hf.generation_config.forced_bos_token_id = 0
    assert start_ids_of(hf, "b") == (2, 0)
