"""The files of the viewer, which the trace's page and the server's live page share."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import ChoiceLoader, Environment, PackageLoader, Template

_VIEWER = ("foredraft.trace", "viewer")


def asset(name: str, package: str = _VIEWER[0], folder: str = _VIEWER[1]) -> str:
    """The text of a file. Raises FileNotFoundError."""
    return files(package).joinpath(folder, name).read_text(encoding="utf-8")


@cache
def page_template(package: str, folder: str) -> Template:
    """The template page.html of a folder. It may include templates of the viewer."""
    loader = ChoiceLoader([PackageLoader(package, folder), PackageLoader(*_VIEWER)])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("page.html")
