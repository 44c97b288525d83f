"""Quantized Hugging Face checkpoints on a CPU: GPTQ, AWQ, compressed-tensors, MXFP4, bitsandbytes."""

from foredraft.model.quantized.load import is_stored_quantized, load_quantized, quantization_of

__all__ = ["is_stored_quantized", "load_quantized", "quantization_of"]
