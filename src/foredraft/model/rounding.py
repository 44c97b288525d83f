"""Round a floating-point checkpoint's linear layers to four bits, before anything runs it.

The layers become stored ones, like those of a checkpoint that is quantized already. So the library's own forward, which the probe
compares with, is that of the rounded model: the original's logits would be too different for a comparison.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from foredraft.kernels import INT4_GROUP, InMemory, load_kernels, quantize_int4, quantize_int8, read_all, why_none
from foredraft.model.options import LoadOptions
from foredraft.model.pages import give_back, mapped_files
from foredraft.model.progress import with_bar
from foredraft.model.stored import StoredLinear, is_linear, source_of

logger = logging.getLogger("foredraft")


@torch.inference_mode()
def round_to_int4(hf: PreTrainedModel, name: str, options: LoadOptions) -> None:
    """Store the linear layers in four bits, in place; the head in eight unless the options say int4-all. If no kernels multiply such
    weights, leave the model as it is and log a warning."""
    reason = _why_not(hf, options)
    if reason is not None:
        logger.warning("%s: quantization is skipped: %s", name, reason)
        return
    head: Any = hf.get_output_embeddings()
    files, num_even, num_odd = mapped_files(), 0, 0
    for parent in with_bar(list(hf.modules()), "Rounding"):
        for child_name, child in list(parent.named_children()):
            if not is_linear(child):
                continue
            is_in_int8 = child is head and options.quantization != "int4-all"
            weights = list(child.parameters())
            weight = read_all(source_of(child, quantize_int8 if is_in_int8 else quantize_int4))
            setattr(parent, child_name, StoredLinear(InMemory(weight), child.bias))
            give_back(weights, files)
            is_odd = bool(weight.shape[1] % INT4_GROUP)
            num_odd, num_even = num_odd + is_odd, num_even + (not is_odd)
    if num_odd:
        logger.warning(
            "%s: %d of %d matrices are stored in int8: their number of inputs is not divisible by %d",
            *(name, num_odd, num_odd + num_even, INT4_GROUP),
        )


def _why_not(hf: PreTrainedModel, options: LoadOptions) -> str | None:
    if hf.device.type != "cpu":
        return f"four-bit products are not available on {hf.device.type}"
    if options.kernels != "auto":
        return 'four-bit products need the compiled kernels: give kernels="auto"'
    if load_kernels() is None:
        return f"four-bit products need the compiled kernels ({why_none()})"
    return None
