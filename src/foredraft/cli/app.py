"""The application: what all commands share, from the first argument to the exit code."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from foredraft.errors import ForedraftError

_MISTAKE, _INTERRUPTED, _PIPE_CLOSED = 2, 130, 141
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""A bad command line. Recent releases of typer have their own copy of click, and do not export this class."""
_HELP_INSTEAD = "NoArgsIsHelpError"
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}


class _Commands(TyperGroup):
    """A mistake of the user ends a command with one line and an exit code, never with a traceback."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*args, **settings)
        except _UsageError as error:
            raise _in_one_line(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except ForedraftError as error:
            raise _mistake(str(error)) from None
        except _UsageError as error:
            raise _in_one_line(error) from None
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            _abandon_output()
            raise typer.Exit(_PIPE_CLOSED) from None
        return result


def _in_one_line(error: Any) -> Exception:
    """Report a bad command line -> what to raise. A command that needs arguments and gets none shows its help, as typer does."""
    if type(error).__name__ == _HELP_INSTEAD:
        return cast("Exception", error)
    return _mistake(error.format_message())


def _mistake(message: str) -> typer.Exit:
    """Report a mistake of the user in one line -> what ends the command."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return typer.Exit(_MISTAKE)


app = typer.Typer(
    rich_markup_mode=None,  # rich cuts the names of options at 80 columns
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(show: bool) -> None:
    if show:
        from foredraft import __version__

        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def foredraft(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding: a drafter guesses, the target verifies, nothing else is trusted."""
    _configure_logging()


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show τ shows a question mark
    try:
        try:
            app(prog_name="foredraft")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        _abandon_output()
        sys.exit(_PIPE_CLOSED)


def _configure_logging() -> None:
    """Show our own warnings on standard error, one line each; hide the libraries' bars and warnings."""
    logger = logging.getLogger("foredraft")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings())
    for name, value in _QUIET.items():  # read when the libraries are imported, usually later
        os.environ.setdefault(name, value)
    if "transformers" in sys.modules:
        from transformers.utils import logging as library

        library.disable_progress_bar()
        library.set_verbosity_error()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}", err=True)


def _abandon_output() -> None:
    """Discard buffered output after the reader has gone, so that closing standard output at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
