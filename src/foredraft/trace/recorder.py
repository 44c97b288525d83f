"""Records the engine's steps in a trace file."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from pydantic_core import PydanticSerializationError
from transformers import PreTrainedTokenizerBase

from foredraft import __version__
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.stats import SpeculationStats
from foredraft.engine.step import Step
from foredraft.errors import ForedraftError, one_line
from foredraft.llm import LLM
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.sampling import SamplingParams
from foredraft.trace.format import BEGINNING, Counts, EndLine, Footer, Header, Line, ModelInfo, TextLine
from foredraft.trace.round_lines import TokenDecoder, round_line, step_line
from foredraft.utils.folders import check_replaceable

logger = logging.getLogger("foredraft")

_OMITTED_PARAMS = {"logits_processors", "n"}


@contextmanager
def record(llm: LLM, path: str | PathLike[str]) -> Generator[Recorder]:
    """Record everything that `llm` generates inside the block. An existing trace is replaced. If a write fails (a full disk), a warning
    is logged and the recording ends there; generation continues.

    Raises ForedraftError if the file cannot be opened, and if it exists and is not a trace.
    """
    check_replaceable(Path(path), BEGINNING)
    try:
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # closed by the with below
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be written: {error.strerror}") from None
    with closing_quietly(file):
        recorder = Recorder(file, header_of(llm), tokenizer=llm.tokenizer)
        llm.engine.observers.append(recorder)
        try:
            yield recorder
        finally:
            llm.engine.observers.remove(recorder)
            recorder.close()


@contextmanager
def closing_quietly(file: TextIO) -> Generator[None]:
    """Close the file at the end of the block, ignoring errors: a failed write was reported when it happened."""
    try:
        yield
    finally:
        with suppress(OSError):
            file.close()


def header_of(llm: LLM) -> Header:
    return Header(
        foredraft=__version__,
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        method=llm.method,
        device=str(llm.target.device),
        adapts=bool(llm.refits),
        target=_model_info(llm.target, llm.options.quantization),
        draft=_draft_info(llm),
    )


def _draft_info(llm: LLM) -> ModelInfo | None:
    """The draft model, or the head that is used instead; None if there is neither."""
    if llm.head_identity is not None:
        return ModelInfo(
            name=llm.head_identity.name, dtype=llm.head_identity.dtype, quantization=llm.head_identity.quantization
        )
    return None if llm.draft is None else _model_info(llm.draft, llm.draft_options.quantization)


def _model_info(model: LanguageModel, quantization: str | None) -> ModelInfo:
    name = model.traits.name
    if Path(name).is_relative_to(EMBEDDED):  # do not record where this package is installed
        name = f"embedded {Path(name).name}"
    dtype = str(model.hf.dtype).removeprefix("torch.")
    return ModelInfo(name=name, dtype=dtype, quantization=None if quantization == "none" else quantization)


class Recorder:
    """An Observer that records every text that starts after it was attached.

    file: gets the lines, and is left open. tokenizer: for the characters of the tokens; None leaves them out. If a write fails, a
    warning is logged once and nothing more is written.
    """

    def __init__(self, file: TextIO, header: Header, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._texts: dict[int, _RecordedText] = {}
        self._num_texts = 0
        self._num_steps = 0
        self._stats = SpeculationStats()
        self._is_broken = False
        self._started_at = time.perf_counter()
        self._write(header)

    def observe(self, step: Step) -> None:
        if not step.scheduled or self._is_broken:
            return
        start = max(0.0, time.perf_counter() - step.total_time - self._started_at)
        num_kept = {id(item): kept for item, kept in zip(step.scoring, step.num_kept, strict=True)}
        for item in step.scheduled:
            self._begin(item.sequence, num_kept.get(id(item), 0))
        self._write(step_line(step, self._num_steps, start))
        for row, item in enumerate(step.scoring):
            text = self._texts.get(item.sequence.seq_id)
            if text is not None:
                self._write(round_line(step, row, text.decoder, text=text.number, number=self._num_steps))
        for item in step.scheduled:
            if item.sequence.is_finished and item.sequence.seq_id in self._texts:
                self._end(item.sequence.seq_id)
        self._num_steps += 1

    def close(self) -> None:
        """End the recording: write the end of the remaining texts and the last line."""
        for seq_id in list(self._texts):
            self._end(seq_id)
        self._write(Footer(num_texts=self._num_texts, num_steps=self._num_steps, counts=Counts.of(self._stats)))

    def _begin(self, sequence: TokenSequence, num_kept: int) -> None:
        """Start recording a text, if it is new: if its only output is this step's."""
        if sequence.seq_id in self._texts or sequence.num_output > num_kept:
            return
        prompt_ids, before = list(sequence.prompt_ids), sequence.tokens[: sequence.prompt_len]
        text = _RecordedText(self._num_texts, sequence, TokenDecoder(self._tokenizer, before))
        self._texts[sequence.seq_id] = text
        self._num_texts += 1
        self._write(
            TextLine(
                text=text.number,
                child=sequence.sampler.child,
                prompt_ids=prompt_ids,
                prompt=None if self._tokenizer is None else str(self._tokenizer.decode(prompt_ids)),
                params=_params(sequence.sampler.params),
            )
        )

    def _end(self, seq_id: int) -> None:
        text = self._texts.pop(seq_id)
        sequence = text.sequence
        self._stats += sequence.stats
        self._write(
            EndLine(
                text=text.number,
                finish_reason=sequence.finish_reason,
                error=sequence.error,
                token_ids=sequence.output_ids,
                num_preemptions=sequence.num_preemptions,
                counts=Counts.of(sequence.stats),
            )
        )

    def _write(self, line: Line) -> None:
        """Write and flush a line, so that if the process is killed, the file is complete up to there."""
        if self._is_broken:
            return
        try:
            self._file.write(line.model_dump_json() + "\n")
            self._file.flush()
        except (OSError, PydanticSerializationError) as error:
            self._is_broken = True
            name, reason = getattr(self._file, "name", "file"), getattr(error, "strerror", None) or one_line(error)
            logger.warning("the trace ends early: %s cannot be written: %s", name, reason)


@dataclass(frozen=True, slots=True)
class _RecordedText:
    """A text that is being recorded, and the decoder of its tokens."""

    number: int
    sequence: TokenSequence
    decoder: TokenDecoder


def _params(params: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in fields(params) if field.name not in _OMITTED_PARAMS}
