"""Where and with what a result was measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

from foredraft import __version__
from foredraft.llm import LLM
from foredraft.model import LanguageModel, LoadOptions
from foredraft.utils.machine import MachineReport, this_machine


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """quantization: of the linear layers, applied while loading; None: not quantised. row_exact: None for a head, for which it does
    not matter."""

    name: str
    dtype: str
    quantization: str | None
    row_exact: bool | None

    @classmethod
    def of(cls, model: LanguageModel, options: LoadOptions) -> ModelIdentity:
        return cls(
            name=model.traits.name,
            dtype=str(model.hf.dtype).removeprefix("torch."),
            quantization=None if options.quantization == "none" else options.quantization,
            row_exact=model.traits.row_exact,
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """date: the day and the minute, with the offset from UTC. draft: None where no draft model was loaded.
    head: the head that was given instead."""

    date: str
    foredraft: str
    device: str
    machine: MachineReport
    target: ModelIdentity
    draft: ModelIdentity | None
    head: ModelIdentity | None = None

    @classmethod
    def of(cls, llm: LLM) -> Environment:
        return cls(
            date=time.strftime("%Y-%m-%d %H:%M %z"),
            foredraft=__version__,
            device=str(llm.target.device),
            machine=this_machine(),
            target=ModelIdentity.of(llm.target, llm.options),
            draft=None if llm.draft is None else ModelIdentity.of(llm.draft, llm.draft_options),
            head=None if llm.head_identity is None else ModelIdentity(*llm.head_identity, row_exact=None),
        )
