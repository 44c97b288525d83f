"""The errors a user can meet. Each message is one line: what was wrong, and what would be right."""


class ForedraftError(ValueError):
    """Base of every error raised for a caller's mistake or an unusable input."""


class ModelError(ForedraftError):
    """A checkpoint that cannot be loaded, or a model that cannot work here."""


class VocabularyError(ModelError):
    """A draft model whose vocabulary is not the target's."""


class PromptLengthError(ForedraftError):
    """A prompt that the context has no room for."""


class RequestError(ForedraftError):
    """A request that failed while it ran; others are not disturbed.

    `outputs` holds the outputs of the whole call, complete but for the failed ones (finish_reason "error").
    """

    def __init__(self, message: str, outputs: list[object] | None = None) -> None:
        super().__init__(message)
        self.outputs = outputs or []


def one_line(error: Exception) -> str:
    """Another library's error in a line of ours: its kind, and the first line of what it says."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text[:300]}"
