"""The errors a user can see. Each message is one line: what was wrong, and what would be right."""


class ForedraftError(ValueError):
    """Base of all errors for a caller's mistake or an unusable input."""


class ModelError(ForedraftError):
    """A checkpoint that cannot be loaded, or a model that is not supported."""


class VocabularyError(ModelError):
    """A draft model whose vocabulary cannot be used with the target's."""


class PromptLengthError(ForedraftError):
    """A prompt that is too long for the model's context."""


class DrafterError(ForedraftError, TypeError):
    """A drafter that breaks its contract."""


class RequestError(ForedraftError):
    """A request that failed while it was running. Other requests are not affected.

    `outputs` holds the outputs of the whole call, complete except for the failed ones (finish_reason "error"). `__cause__`
    is the exception that ended the request, if there was one.
    """

    def __init__(self, message: str, outputs: list[object] | None = None) -> None:
        super().__init__(message)
        self.outputs = outputs or []


def one_line(error: BaseException) -> str:
    """Describe another library's error in one line: its type, and the first line of its message, with the next one if it ends in a
    colon."""
    try:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    except Exception:  # a foreign exception class whose __str__ fails
        lines = []
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else "no message"
    return f"{type(error).__name__}: {text[:300]}"


def message_of(error: Exception) -> str:
    """The message for a request that this error ended: that of a ForedraftError, else the error's type and first line."""
    return str(error) if isinstance(error, ForedraftError) else one_line(error)


def shown(value: object, most: int = 80) -> str:
    """Format a value for an error message: one line of at most `most` characters, then three dots if it was cut."""
    try:
        text = repr(value)
    except Exception:  # an integer with more digits than Python prints, or a __repr__ that fails
        text = f"{type(value).__name__} that cannot be printed"
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."
