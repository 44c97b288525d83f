"""The layer between text and token ids: requests, outputs, decoding, stop strings and structured outputs."""
