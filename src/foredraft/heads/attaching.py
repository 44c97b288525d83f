"""Loading a head for a loaded target, whose embedding and lm_head it borrows if it has none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.errors import ModelError
from foredraft.heads.calibration import MIN_TOKENS, calibrate
from foredraft.heads.compiled import CompiledEagle
from foredraft.heads.config import DFlashConfig, EagleConfig, ExitConfig, HeadCheckpoint, MedusaConfig, TargetShape
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle import EagleHead
from foredraft.heads.early_exit import EarlyExit
from foredraft.heads.head_format import NOT_ROUNDED, HeadFormat
from foredraft.heads.loading import load_head, load_mtp
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.module import HeadModule
from foredraft.heads.mtp import MtpHead
from foredraft.heads.options import HeadOptions, overridden, window_of
from foredraft.kernels import WeightFormat, quantize_int8
from foredraft.model.language_model import LanguageModel
from foredraft.model.packed import NativeEmbedding
from foredraft.model.stack import StackBody
from foredraft.model.stored import StoredEmbedding
from foredraft.utils.machine import multiplies_bfloat16

AnyHead = EagleHead | CompiledEagle | DFlashHead | MedusaHead | EarlyExit | MtpHead

_Head = TypeVar("_Head", bound=HeadModule)

logger = logging.getLogger("foredraft")

_NO_OPTIONS = HeadOptions()
_LARGE = 2.0**20
"""Times a weight, it is so much larger than a bias that their sum is rounded to the former."""


def attach_head(
    name: str,
    target: LanguageModel,
    revision: str | None = None,
    options: HeadOptions = _NO_OPTIONS,
    head_format: HeadFormat = NOT_ROUNDED,
    text: Sequence[int] = (),
) -> AnyHead:
    """The head in a directory or under a hub id, in the target's precision and on its device. If the files leave something open, the
    log says how they were read.

    head_format: of its matrices, if the target's kernels run it; int8 in place of no rounding if the head is stored quantised. text:
    tokens that the target reads if the files leave something open, to find the best settings (see calibration.py); without it the
    format's own defaults hold. Raises ModelError, see load_head and overridden.
    """
    shape, ends = TargetShape.of(target.hf.config), TargetEnds(target.hf)
    checkpoint = _with_options(name, load_head(name, shape, revision), options, shape)
    if checkpoint.is_quantized and head_format == NOT_ROUNDED:
        head_format = HeadFormat.same(quantize_int8)
    if isinstance(checkpoint.config, ExitConfig):
        return EarlyExit.of(checkpoint, target, head_format.small)
    if isinstance(checkpoint.config, MedusaConfig):
        medusa = MedusaHead.of(checkpoint, ends.lm_head, target.hf.dtype, ends.embed)
        return _packed(medusa.to(target.device), target, head_format.small)
    if isinstance(checkpoint.config, DFlashConfig):
        checkpoint = ends.with_rows(_calibrated(name, checkpoint, target, ends, text))
        dtype = block_dtype(target.hf.dtype, target.device)
        block_head = DFlashHead.of(checkpoint, ends.embed, ends.lm_head, dtype).to(target.device)
        block_head.compile_chains(target.body.kernels)
        return _packed(block_head, target, head_format.small)
    assert isinstance(checkpoint.config, EagleConfig)  # MTP layers have no files of their own
    window = _window(name, checkpoint.config, options, target)
    checkpoint = _calibrated(name, checkpoint, target, ends, text)
    head = EagleHead.of(ends.with_rows(checkpoint), ends.embed, ends.lm_head, target.hf.dtype, window).to(target.device)
    weight_format = head_format.of(checkpoint.config, head)
    return _compiled(head, target, weight_format) or _packed(head, target, weight_format)


def attach_mtp(
    name: str, target: LanguageModel, revision: str | None = None, options: HeadOptions = _NO_OPTIONS
) -> MtpHead:
    """The MTP layers of the target's own checkpoint, in its precision and on its device. name: the checkpoint's directory or hub id.

    Raises ModelError, see load_mtp and overridden, and for layers that our attention cannot run.
    """
    hf, ends = target.hf, TargetEnds(target.hf)
    checkpoint = _with_options(name, load_mtp(name, hf, revision), options, TargetShape.of(hf.config))
    head = MtpHead.of(checkpoint, ends.embed, ends.lm_head, hf.dtype, options.window or None).to(target.device)
    head.route(target.device, target.body.kernels)
    head.try_out(name, target.device)
    return head


def block_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a block drafter runs for a target in this dtype. On a CPU without bfloat16 instructions, PyTorch's products in
    bfloat16 take four times as long as in float32."""
    is_slow = device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16()
    return torch.float32 if is_slow else dtype


def _with_options(name: str, checkpoint: HeadCheckpoint, options: HeadOptions, shape: TargetShape) -> HeadCheckpoint:
    """The checkpoint with the user's settings. Its notes are logged."""
    try:
        checkpoint = overridden(checkpoint, options.settings, shape)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    for note in checkpoint.notes:
        logger.info("%s: %s", name, note)
    return checkpoint


def _calibrated(
    name: str, checkpoint: HeadCheckpoint, target: LanguageModel, ends: TargetEnds, text: Sequence[int]
) -> HeadCheckpoint:
    """The checkpoint with the settings that fit the target best, if the files leave something open."""
    if not checkpoint.config.ambiguities or len(text) < MIN_TOKENS:
        return checkpoint
    calibration = calibrate(checkpoint, target, ends.embed, ends.lm_head, text)
    level = logging.INFO if calibration.keeps_defaults else logging.WARNING
    logger.log(level, "%s: %s", name, calibration)
    return checkpoint.with_settings(**calibration.fields, ambiguities=())


def _window(name: str, config: EagleConfig, options: HeadOptions, target: LanguageModel) -> int | None:
    context_len = getattr(target.hf.config.get_text_config(), "max_position_embeddings", None)
    window = window_of(config, options.window, context_len)
    if window is not None and options.window is None:
        logger.info("%s: it sees %d tokens at a time, as in training; set head_window to change that", name, window)
    return window


def _compiled(head: EagleHead, target: LanguageModel, weight_format: WeightFormat) -> CompiledEagle | None:
    """The head run by the target's compiled kernels; None unless they run the target as one call and support the head."""
    if not (isinstance(target.body, StackBody) and CompiledEagle.supports(head)):
        return None
    embedding = target.hf.get_input_embeddings()
    table = embedding.matrix if isinstance(embedding, NativeEmbedding) else embedding.weight.detach()
    return CompiledEagle(head, table, target.hf.get_output_embeddings().matrix, target.body.kernels, weight_format)


def _packed(head: _Head, target: LanguageModel, weight_format: WeightFormat) -> _Head:
    """The head, with its matrices packed if the target has compiled kernels."""
    if target.body.kernels is not None:
        head.pack(target.body.kernels, weight_format)
    return head


class TargetEnds:
    """The embeddings and lm_head of a target. hf: a loaded target, in any weight format.

    logit_scale: the factor by which the target multiplies its logits (Granite, Cohere). logit_softcap: the magnitude that they stay
    below after that (Gemma 2); 0: there is none.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._embedding: Any = hf.get_input_embeddings()
        self._lm_head: Any = hf.get_output_embeddings()
        self._dtype = hf.dtype
        config = hf.config.get_text_config()
        self.logit_scale = _logit_scale(config)
        self.logit_softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [R] -> rows [R, hidden] of the table, before any scaling that the target's own layer applies."""
        if isinstance(self._embedding, NativeEmbedding | StoredEmbedding):
            return self._embedding.rows(ids)
        return nn.functional.embedding(ids, self._embedding.weight)

    def with_rows(self, checkpoint: HeadCheckpoint) -> HeadCheckpoint:
        """Give a head that drafts part of the vocabulary with the target's lm_head its own copy of those rows, so that only they are
        computed."""
        if not checkpoint.borrows_rows:
            return checkpoint
        return checkpoint.with_lm_head(self.lm_head_rows(checkpoint.config.target_ids))

    @torch.inference_mode()
    def lm_head(self, x: Tensor) -> Tensor:
        """[R, hidden] -> logits [R, V], in the wider of their dtype and that of x"""
        logits: Tensor = self._lm_head(x.to(self._dtype))
        return logits.to(torch.promote_types(x.dtype, logits.dtype))

    @torch.no_grad()  # not inference mode: these rows may be used in a loss
    def lm_head_rows(self, ids: Tensor | None) -> Tensor:
        """Rows of the lm_head, [len(ids), hidden] float32; None: all. If the matrix is packed, they are computed as its products with
        multiples of the unit vectors, and are rounded in eight-bit formats."""
        weight = self._weight
        if weight is None:
            unit = _LARGE * torch.eye(self._lm_head.in_features, dtype=torch.bfloat16)
            weight = self._lm_head(unit).T.float() / _LARGE
        rows: Tensor = weight if ids is None else weight[ids]
        return rows.float().clone()

    @torch.no_grad()
    def lm_head_bias(self, ids: Tensor | None) -> Tensor | None:
        """The bias of the same rows, [len(ids)] float32; None: there is none."""
        bias: Tensor | None = self._lm_head.bias if self._weight is not None else self._of_zeros()
        if bias is None or not bias.any():
            return None
        return (bias if ids is None else bias[ids]).float().clone()

    def _of_zeros(self) -> Tensor:
        """The output of a packed lm_head for zeros: its bias, [V]."""
        out: Tensor = self._lm_head(torch.zeros(1, self._lm_head.in_features, dtype=torch.bfloat16))
        return out[0]

    @property
    def _weight(self) -> Tensor | None:
        """The matrix of the lm_head; None if it is packed."""
        weight: Tensor | None = getattr(self._lm_head, "weight", None)
        return weight


def _logit_scale(config: Any) -> float:
    """The factor by which a target multiplies its logits, by either name that the library has for it."""
    factor, divisor = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
    return (float(factor) if isinstance(factor, int | float) else 1.0) / (
        float(divisor) if isinstance(divisor, int | float) and divisor else 1.0
    )
