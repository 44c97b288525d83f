"""A model run by the library's own code, with our attention, experts and linear layers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.kernels import Kernels, WeightFormat
from foredraft.model.attention import AttentionMetadata
from foredraft.model.batch import RaggedBatch, Reading, padded_batch
from foredraft.model.exits import Exit
from foredraft.model.routing import route, routed
from foredraft.model.rows import rule_of
from foredraft.model.structure import decoder_layers, shortened
from foredraft.model.warm_up import WarmUpSizes


class LibraryBody:
    """Leaves hf unchanged until `take_over`. kernels: for attention; None: PyTorch's."""

    is_batch_invariant = False

    def __init__(self, hf: PreTrainedModel, kernels: Kernels | None = None) -> None:
        self._hf = hf
        self.kernels = kernels
        self._row_rule = rule_of(hf)
        self._is_taken_over = False
        self._keeps_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters

    @torch.inference_mode()
    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        num_rows, wanted = len(batch.ids), batch.wanted
        batch = padded_batch(batch, self._row_rule)
        inputs = self._inputs(batch)
        if self._keeps_rows:
            inputs["logits_to_keep"] = batch.wanted  # a list indexes hidden states on any device
        if taps:
            inputs["output_hidden_states"] = True
        with nullcontext() if self._is_taken_over else routed(self._hf), _LastLayer(self._hf, taps) as last_layer:
            outputs = self._hf(**inputs)
        logits: Tensor = outputs.logits[0]
        if not self._keeps_rows:
            logits = logits[batch.wanted]
        hidden = [last_layer.tapped(outputs.hidden_states, tap)[0, :num_rows].to(logits.device) for tap in taps]
        return Reading(logits[: len(wanted)], torch.cat(hidden, dim=-1) if hidden else None)

    def first_layers(self, num_layers: int, exit: Exit | None, weight_format: WeightFormat) -> LibraryBody:
        """See ExitingBody. An exit's matrices are used as they are."""
        body = LibraryBody(shortened(self._hf, num_layers, exit), self.kernels)
        body._is_taken_over = self._is_taken_over
        return body

    def _inputs(self, batch: RaggedBatch) -> dict[str, Any]:
        device = self._hf.device
        return {
            "input_ids": torch.tensor([batch.ids], device=device),
            "position_ids": torch.tensor([batch.positions], device=device),
            # without a mask the library would take the ragged batch for packed training sequences
            "attention_mask": torch.ones(1, len(batch.ids), dtype=torch.bool, device=device),
            "use_cache": False,
            "attention_metadata": AttentionMetadata.of(batch, self.kernels),
        }

    def take_over(self) -> None:
        """Keep the model routed, so that passes need not switch to our attention and back."""
        route(self._hf)
        self._is_taken_over = True

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Nothing to prepare."""


class _LastLayer:
    """Records the output of the last layer during a pass; the library's hidden states have it only after the final norm."""

    def __init__(self, hf: PreTrainedModel, taps: Sequence[int]) -> None:
        self._num_layers = int(hf.config.get_text_config().num_hidden_layers)
        self._module = decoder_layers(hf)[-1] if self._num_layers in taps else None
        self._output: Tensor | None = None

    def __enter__(self) -> _LastLayer:
        if self._module is not None:
            self._handle = self._module.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            self._handle.remove()

    def _keep(self, _module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._output = output if isinstance(output, Tensor) else output[0]

    def tapped(self, hidden_states: Sequence[Tensor], tap: int) -> Tensor:
        """[1, R, hidden]. hidden_states: the library's, of which the last is after the final norm."""
        if tap != self._num_layers:
            return hidden_states[tap]
        assert self._output is not None
        return self._output
