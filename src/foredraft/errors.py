"""The errors a user can meet. Each message is one line: what was wrong, and what would be right."""


class ForedraftError(ValueError):
    """Base of every error raised for a caller's mistake or an unusable input."""


class ModelError(ForedraftError):
    """A checkpoint that cannot be loaded, or a model that cannot work here."""


class VocabularyError(ModelError):
    """A draft model whose vocabulary is not the target's."""


class PromptLengthError(ForedraftError):
    """A prompt that the context has no room for."""


class DrafterError(ForedraftError, TypeError):
    """A drafter that breaks its contract."""


class RequestError(ForedraftError):
    """A request that failed while it ran; others are not disturbed.

    `outputs` holds the outputs of the whole call, complete but for the failed ones (finish_reason "error"). `__cause__` is
    the exception that ended the request, where it was one.
    """

    def __init__(self, message: str, outputs: list[object] | None = None) -> None:
        super().__init__(message)
        self.outputs = outputs or []


def one_line(error: Exception) -> str:
    """Another library's error in a line of ours: its kind, and the first line of what it says."""
    try:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    except Exception:  # an exception class of somebody else's, whose own __str__ fails
        lines = []
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text[:300]}"


def message_of(error: Exception) -> str:
    """What a request that it ended says: one of ours speaks for itself."""
    return str(error) if isinstance(error, ForedraftError) else one_line(error)


def shown(value: object, most: int = 80) -> str:
    """A value as an error message shows it: in one line, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or a __repr__ that fails
        text = f"{type(value).__name__} that cannot be printed"
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."
