"""Choose the body that runs a loaded model, and lay out the weights for it."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.gpu import Graphs, why_not
from foredraft.kernels import Kernels, WeightFormat, WeightMemory, load_kernels, quantize_int8, unquantized
from foredraft.model.context import context_len_of
from foredraft.model.device_stack import DeviceStackBody, has_device_form
from foredraft.model.input_rounding import GroupOf, everywhere, never, where_stored
from foredraft.model.language_model import Body, source_reading_body
from foredraft.model.library import LibraryBody
from foredraft.model.memory import is_spread, refuse_if_dequantized_too_big
from foredraft.model.options import LoadOptions
from foredraft.model.packed import (
    Int8Linear,
    NativeLinear,
    PackedLinear,
    int8_is_exact,
    pack_embedding,
    pack_linears,
    packs,
)
from foredraft.model.pages import give_back
from foredraft.model.source_stack import SourceStackBody, has_source_stack_form
from foredraft.model.stack import StackBody, has_stack_form
from foredraft.model.stored import materialize, materialize_experts
from foredraft.utils.arguments import FOUR_BITS

logger = logging.getLogger("foredraft")


@torch.inference_mode()
def prepare(hf: PreTrainedModel, name: str, options: LoadOptions) -> Body:
    """Set up the body that runs fastest on this processor. This changes the model, so it is only for models that were loaded here."""
    give_back(hf.parameters())  # the library's pass has read the whole file; pages that are needed again are read again
    wants_int8 = options.quantization == "int8" and _can_be_int8(hf)
    if hf.config.is_encoder_decoder:
        return _prepare_encoder_decoder(hf, options, wants_int8=wants_int8)
    if hf.device.type == "cuda":
        materialize(hf)
    if hf.device.type == "cuda" and options.kernels == "auto" and _fits_a_device(hf):
        context_len = context_len_of(hf.config, name)
        return DeviceStackBody(hf, context_len, Graphs(hf.device), is_batch_invariant=options.batch_invariant)
    weight_format = quantize_int8 if wants_int8 else unquantized
    is_rounded = wants_int8 or options.quantization in FOUR_BITS
    kernels = _kernels_for(hf, options, is_rounded)
    runs_stack = kernels is not None and has_stack_form(hf)
    refuse_if_dequantized_too_big(hf, name, packs_linears=kernels is not None, packs_experts=runs_stack)
    if kernels is None:
        materialize(hf)
    if wants_int8 or (is_rounded and kernels is not None):
        _narrow_the_rest(hf)
    if kernels is not None and runs_stack:
        return StackBody(hf, kernels, context_len_of(hf.config, name), weight_format)
    if kernels is not None:
        materialize_experts(hf)
        pack_embedding(hf, kernels)
    _pack(hf, kernels, weight_format)
    return LibraryBody(hf, kernels)


def _prepare_encoder_decoder(hf: PreTrainedModel, options: LoadOptions, *, wants_int8: bool) -> Body:
    is_rounded = wants_int8 or options.quantization in FOUR_BITS
    kernels = _kernels_for(hf, options, is_rounded)
    if wants_int8 or (is_rounded and kernels is not None):
        _narrow_the_rest(hf)
    weight_format = quantize_int8 if wants_int8 else unquantized
    if kernels is not None and has_source_stack_form(hf):
        return SourceStackBody(hf, kernels, weight_format)
    _pack(hf, kernels, weight_format)
    return source_reading_body(hf, kernels)


def _pack(hf: PreTrainedModel, kernels: Kernels | None, weight_format: WeightFormat) -> None:
    """Pack the linear layers. kernels: ours; None: PyTorch's."""
    if kernels is not None:
        memory = WeightMemory()
        pack_linears(hf, lambda source, bias: NativeLinear(kernels.pack(source, bias, memory), kernels), weight_format)
    elif weight_format is quantize_int8:
        pack_linears(hf, Int8Linear.of, weight_format)
    elif packs(hf.dtype, hf.device, is_compiled=False):
        pack_linears(hf, PackedLinear.of)


def rounded_groups(options: LoadOptions) -> GroupOf:
    """Which inputs are rounded by the body that `prepare` makes."""
    if options.torch_device().type != "cpu":
        return never
    if options.quantization == "int8":
        return everywhere
    return where_stored if options.kernels == "auto" else never


def _fits_a_device(hf: PreTrainedModel) -> bool:
    """Whether the whole model is on one GPU, and our GPU passes run there and compute the same."""
    if is_spread(hf) or is_quantized(hf) or not has_device_form(hf):
        return False
    reason = why_not(hf.device, hf.dtype)
    if reason is not None:
        logger.warning(
            "kernels are not used on %s (%s): PyTorch's own are used instead, which are slower", hf.device, reason
        )
    return reason is None


def _kernels_for(hf: PreTrainedModel, options: LoadOptions, is_rounded: bool) -> Kernels | None:
    """Our kernels, which compute in bfloat16 or with quantized weights on the CPU; None if they do not fit the model."""
    fits = hf.device.type == "cpu" and (hf.dtype == torch.bfloat16 or is_rounded) and not is_quantized(hf)
    return compiled_kernels(options) if fits else None


def compiled_kernels(options: LoadOptions) -> Kernels | None:
    """Our kernels, if the options allow them and they are available."""
    return load_kernels() if options.kernels == "auto" else None


def is_quantized(hf: PreTrainedModel) -> bool:
    return bool(getattr(hf, "is_quantized", False))


def _can_be_int8(hf: PreTrainedModel) -> bool:
    """Exact int8 products need a processor that supports them; elsewhere the model runs as it was loaded."""
    if hf.device.type != "cpu":
        reason = f"exact int8 products are not available on {hf.device.type}"
    elif load_kernels() is None and not int8_is_exact():
        reason = "this processor multiplies int8 inexactly"
    else:
        return True
    logger.warning("quantization is skipped: %s", reason)
    return False


def _narrow_the_rest(hf: PreTrainedModel) -> None:
    """Convert everything but the matrices that will be quantised to bfloat16. Buffers (rotary frequencies) stay."""
    matrices = {id(child.weight) for child in hf.modules() if type(child) in (torch.nn.Linear, Conv1D)}
    embedding = id(getattr(hf.get_input_embeddings(), "weight", None))
    for module in hf.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and (id(parameter) not in matrices or id(parameter) == embedding):
                parameter.data = parameter.data.to(torch.bfloat16)
