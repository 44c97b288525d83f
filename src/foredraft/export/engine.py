"""The description of an engine for exports: its name for each method, what it cannot express, and how to write its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from foredraft.errors import ForedraftError
from foredraft.export.choice import Choice, is_encoder_decoder, is_gguf_name, with_loaded_head
from foredraft.export.differences import ALWAYS, DRAFTING, QUANTIZED, TREES
from foredraft.export.heads import HeadForm, check_form, written
from foredraft.utils.arguments import rounds

_REMOTE = (
    "a foredraft draft server drafts for foredraft only; the nearest alternative is the method that it drafts with"
)
_ONE_PASS = "methods that draft in one pass are not exported yet; the nearest alternative is"
NOT_EXPORTED: Mapping[str, str] = MappingProxyType(
    {
        "remote": _REMOTE,
        "pard": f"{_ONE_PASS} --method draft_model with the same model",
        "peagle": f"{_ONE_PASS} an EAGLE head (--method eagle)",
        "dflash": f"{_ONE_PASS} an EAGLE head (--method eagle)",
    }
)
"""Methods that are exported to no engine: the reason, and the nearest method that can be exported."""
NO_COPY = "it does not make a quantized copy of the target; the nearest alternative is"
NO_MTP = "MTP layers are not exported to it yet; the nearest alternative is"
WITHOUT_HEADS: Mapping[str, str] = MappingProxyType(
    {
        **NOT_EXPORTED,
        "suffix": "it does not support suffix decoding; the nearest alternative is --method ngram",
        "medusa": "it does not support Medusa; the nearest alternative is --method draft_model",
        "mtp": f"{NO_MTP} --method ngram",
        "early_exit": "it cannot draft with layers of the target; the nearest alternative is --method draft_model",
    }
)
"""What cannot be exported to an engine that has only n-gram lookup and draft models."""


class Translation(NamedTuple):
    """fields: the engine's own keys and values, without the target's name. differences: what will differ on that engine, one sentence
    each. rounds_drafts: whether the fields say how the draft model is rounded while it is loaded."""

    fields: Mapping[str, Any]
    differences: tuple[str, ...] = ()
    rounds_drafts: bool = False


Translate = Callable[[Choice], Translation]


class Export(NamedTuple):
    """text: the engine's configuration. differences: see Translation."""

    text: str
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """name: as `--to` takes it. version: the one that the configuration is valid for. title: as people write it.

    methods: the translation of each method, by foredraft's name. refused: why a method cannot be expressed, and the nearest that can.
    combinations: translations of several methods together. heads: the form of head that a method needs. plain: the translation without
    speculation. render: writes the configuration as the engine reads it. reads_gguf: whether models must be GGUF files.
    """

    name: str
    title: str
    version: str
    methods: Mapping[str, Translate]
    refused: Mapping[str, str]
    render: Callable[[Choice, Mapping[str, Any]], str]
    combinations: Mapping[frozenset[str], Translate] = field(default_factory=dict)
    heads: Mapping[str, HeadForm] = field(default_factory=dict)
    plain: Translation = field(default_factory=lambda: Translation({}))
    reads_gguf: bool = False

    def export(self, choice: Choice, head_output: Path | None = None) -> Export:
        """head_output: the folder to write a head to, in the form that the engine loads; the configuration then names that folder.

        Raises ForedraftError, with the reason and the nearest alternative, for a choice that the engine cannot express.
        """
        self._check_files(choice)
        translate = self._translation_of(choice)
        choice = self._with_head(with_loaded_head(choice), head_output)
        translation = translate(choice)
        differences = (*translation.differences, *self._of_choice(choice, translation))
        text = f"# {self.title} {self.version}\n{self.render(choice, translation.fields)}"
        return Export(text if text.endswith("\n") else f"{text}\n", differences)

    def _translation_of(self, choice: Choice) -> Translate:
        """The translation of the choice's methods. Raises ForedraftError for methods that the engine cannot express."""
        if not choice.methods:
            return lambda _: self.plain
        if len(choice.methods) > 1:
            translate = self.combinations.get(frozenset(choice.methods))
            if translate is None:
                raise self.refusal(choice, self._why_not_together(choice.methods))
            return translate
        (method,) = choice.methods
        if method in self.refused:
            raise self.refusal(choice, self.refused[method])
        return self.methods[method]

    def _why_not_together(self, methods: Sequence[str]) -> str:
        usable = next((method for method in methods if method in self.methods), None)
        if usable is not None:
            return f"it takes one method; the nearest alternative is one of them: --method {usable}"
        return self.refused[methods[0]]

    def _with_head(self, choice: Choice, folder: Path | None) -> Choice:
        form = next((self.heads[method] for method in choice.methods if method in self.heads), None)
        if folder is not None:
            if form is None:
                raise ForedraftError(
                    f"--head-output is for heads, but {self.title} uses {choice.method} without a head"
                )
            return written(choice, form, folder)
        if form is not None:
            check_form(choice, self.title, form)
        return choice

    def refusal(self, choice: Choice, reason: str) -> ForedraftError:
        return ForedraftError(f"{self.title} {self.version} cannot use {choice.method}: {reason}")

    def _check_files(self, choice: Choice) -> None:
        for name in (choice.target, choice.draft):
            if name is None:
                continue
            if is_encoder_decoder(name):
                raise ForedraftError(
                    f"{name} is an encoder-decoder, which is not exported: LLM and foredraft.generate run it"
                )
            if is_gguf_name(name) == self.reads_gguf:
                continue
            wanted = (
                "a GGUF file, which llama.cpp's convert_hf_to_gguf.py makes from it"
                if self.reads_gguf
                else ("the checkpoint in Hugging Face format that it was made from")
            )
            raise ForedraftError(f"{self.title} {self.version} cannot load {name}: give {wanted}")

    def _of_choice(self, choice: Choice, translation: Translation) -> tuple[str, ...]:
        found = [*ALWAYS, *(DRAFTING if choice.methods else ())]
        rounded = [choice.quantization, *([] if translation.rounds_drafts else [choice.draft_quantization])]
        found += [QUANTIZED] if any(map(rounds, rounded)) else []
        found += [TREES] if choice.has_trees else []
        return tuple(found)


def num_tokens(choice: Choice, engine: str) -> int:
    """γ, for an engine that drafts a fixed number of tokens. Raises ForedraftError for "auto"."""
    if not isinstance(choice.speculative_tokens, int):
        raise ForedraftError(
            f"{engine} drafts a fixed number of tokens and cannot use auto: the nearest alternative is a number that "
            "foredraft tune finds, such as --speculative-tokens 4"
        )
    return choice.speculative_tokens
