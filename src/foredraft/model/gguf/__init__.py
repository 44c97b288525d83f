"""GGUF files, as llama.cpp writes them, as models."""

from foredraft.model.gguf.checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
