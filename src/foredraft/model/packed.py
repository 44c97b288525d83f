"""Linear layers whose bfloat16 weights are laid out once for the processor's matrix kernels (oneDNN).

A plain `nn.Linear` has its weights laid out anew in every pass; for the few rows of a verification that costs more than
the product. The numbers are the same: the kernel that runs is the one that `F.linear` would have chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_TYPICAL_ROWS = 8


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed. weight: [out, in] bfloat16 on the CPU, not kept; bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self.register_buffer("_bias", bias)
        self.num_bytes = weight.numel() * weight.element_size()
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        out: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return out


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model loaded so is packed: in bfloat16, by a processor that multiplies it itself."""
    return (
        dtype == torch.bfloat16
        and device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.inference_mode()
def pack_linears(hf: PreTrainedModel) -> int:
    """Replace the model's linear layers in place; say how many. Each original's weights go as its packed ones come, so
    the model is never held twice. Subclasses of nn.Linear (quantised ones) are left alone."""
    count = 0
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed = PackedLinear(child.weight, child.bias)
            elif type(child) is Conv1D:
                packed = PackedLinear(child.weight.t(), child.bias)
            else:
                continue
            setattr(parent, name, packed)
            count += 1
    return count


def weight_bytes(hf: PreTrainedModel) -> int:
    """What a model's weights take in memory: shared ones once, packed ones in their packed form."""
    tensors: list[Tensor] = [*hf.parameters(), *hf.buffers()]
    packed = sum(module.num_bytes for module in hf.modules() if isinstance(module, PackedLinear))
    return packed + sum(t.numel() * t.element_size() for t in tensors)
