"""Load GGUF files, as written by llama.cpp, as models."""

from foredraft.model.gguf.checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
