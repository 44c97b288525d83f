"""The findings of an inspection, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foredraft.utils.machine import MachineReport


@dataclass(frozen=True, slots=True)
class Costs:
    """In bytes; None if unknown."""

    weight_bytes: int | None
    cache_bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model.

    attention: the number of layers of each kind. num_tokens: in the tokenizer. logit_width: may be larger, because of padding.
    predicted: from the configuration and the file headers. measured: after loading; None if the model was not loaded.
    row_exact: whether a row's bits were measured to be independent of the other rows of a pass; None if the model was not
    loaded. quantization: of the linear layers, applied while loading. load_bytes: the predicted peak on the host while
    loading. pass_bytes: of the matrices that a pass reads, by precision; None if unknown. num_mtp_layers: the MTP layers in the
    checkpoint, with which it can draft for itself.
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
    pass_bytes: dict[str, int] | None = None
    num_mtp_layers: int = 0

    @property
    def costs(self) -> Costs:
        """Measured if there is a measurement, else predicted."""
        return self.measured or self.predicted


@dataclass(frozen=True, slots=True)
class HeadReport:
    """One head.

    kind: of its configuration, such as "eagle1" (and 2), "eagle3", "dflash" or "medusa". form: the file format. num_layers: decoder layers;
    for Medusa the number of heads. taps: the hidden states of the target that it reads, numbered as in model/taps.py; reads: the same in
    words. coverage: the share of a text's tokens that it can draft; None without a text. borrows: the weights that it takes from the
    target. training_len: the length of the texts it was trained on, if the files give it. open_settings: the settings that the files leave
    open, each with its possible values, the format's default first. notes: on how the files were read.

    weight_bytes: of its own weights, by precision. step_bytes: of the matrices read for a draft token, by precision, including the
    target's lm_head if it is used; for heads that draft in one pass, as Medusa's, of a whole draft. target_pass_bytes: see
    ModelReport.pass_bytes. feature_bytes_per_token, own_cache_bytes_per_token: of the hidden states that are kept for it, and of its own
    keys and values. precision: of its matrices, as it would run; None: where PyTorch multiplies by them. predicted, measured, load_bytes:
    as in ModelReport.
    """

    name: str
    kind: str
    form: str
    num_layers: int
    num_parameters: int
    taps: tuple[int, ...]
    reads: list[str]
    draft_vocab_size: int
    vocab_size: int
    borrows: list[str]
    training_len: int | None
    open_settings: dict[str, list[Any]]
    notes: list[str]
    weight_bytes: dict[str, int]
    step_bytes: dict[str, int]
    target_pass_bytes: dict[str, int] | None
    feature_bytes_per_token: int
    own_cache_bytes_per_token: int
    precision: str | None
    predicted: Costs
    load_bytes: int
    coverage: float | None = None
    measured: Costs | None = None

    @property
    def costs(self) -> Costs:
        """Measured if there is a measurement, else predicted."""
        return self.measured or self.predicted

    def step_share(self, precision: str) -> float | None:
        """step_bytes as a fraction of a target pass's bytes, both in this precision; None if the latter are unknown."""
        passes = self.target_pass_bytes
        return None if passes is None else self.step_bytes[precision] / passes[precision]


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    """How well a draft model's vocabulary matches the target's, from their tokenizers.

    method: "same" for equal vocabularies, else how the draft model is used, see LLM(heterogeneous_vocab=). agreement: on the text, the
    share of the draft's ids that match one id of the target at the same place. target_bytes_per_id, draft_bytes_per_id: on the same
    text. These three are None for equal vocabularies whose tokens cannot be read as bytes. text: "built-in" or "given". is_chosen:
    whether the method was chosen from these numbers, not by the user.
    """

    method: str
    agreement: float | None
    target_bytes_per_id: float | None
    draft_bytes_per_id: float | None
    text: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of the target and its draft model or head together.

    when: "free", or "free after loading". num_full_contexts: the number of sequences of the target's full context that the
    default cache budget holds. process_bytes: resident memory of this process before anything was loaded, mostly libraries;
    0 on another device. peak_bytes: the most that this process will hold on the device, while loading or later, with one sequence
    that grows to the full context. Temporary buffers of passes are not included.
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
    """fits: whether target and draft can work together on this machine. reason: why not, in one line. head: instead of a draft
    model. vocabularies: None without a draft model, if either model has no tokenizer, or if they cannot be used together."""

    fits: bool
    reason: str | None
    target: ModelReport
    draft: ModelReport | None
    memory: MemoryReport
    machine: MachineReport
    exactness: str
    head: HeadReport | None = None
    vocabularies: VocabularyReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        return asdict(self)
