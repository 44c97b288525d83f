"""What an inspection finds, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foredraft.utils.machine import MachineReport


@dataclass(frozen=True, slots=True)
class Costs:
    """In bytes; None where unknown."""

    weight_bytes: int | None
    cache_bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model.

    attention: the number of layers of each kind. num_tokens: in the tokenizer. logit_width: may be larger, by padding.
    predicted: from the configuration and the file headers. measured: after loading; None if the model was not loaded.
    row_exact: whether a row's bits were measured to be independent of the other rows of a pass; None if the model was not
    loaded. quantization: of the linear layers, applied while loading. load_bytes: the predicted peak on the host while
    loading.
    """

    name: str
    architecture: str
    attention: dict[str, int]
    dtype: str
    num_parameters: int | None
    context_len: int
    num_tokens: int | None
    logit_width: int | None
    predicted: Costs
    measured: Costs | None = None
    row_exact: bool | None = None
    quantization: str | None = None
    load_bytes: int | None = None

    @property
    def costs(self) -> Costs:
        """Measured if there is a measurement, else predicted."""
        return self.measured or self.predicted


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Of target and draft together.

    when: "free", or "free after loading". num_full_contexts: the number of sequences of the target's full context that the
    default cache budget holds. process_bytes: resident memory of this process before anything was loaded, mostly libraries;
    0 on another device. peak_bytes: the most this process will hold on the device, while loading or later, with one text
    that grows to the full context. A pass's temporary buffers are not included.
    """

    device: str
    when: str
    available_bytes: int | None
    weight_bytes: int | None
    cache_bytes_per_token: int | None
    full_context_bytes: int | None
    num_full_contexts: int | None
    process_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """fits: whether target and draft can work together on this machine. reason: why not, in one line."""

    fits: bool
    reason: str | None
    target: ModelReport
    draft: ModelReport | None
    memory: MemoryReport
    machine: MachineReport
    exactness: str

    def as_dict(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        return asdict(self)
