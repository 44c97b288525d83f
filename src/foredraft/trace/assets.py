"""What pages are made of: the files of the viewer, which the trace's page and the server's share."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import ChoiceLoader, Environment, PackageLoader, Template

_VIEWER = ("foredraft.trace", "viewer")


def asset(name: str, package: str = _VIEWER[0], folder: str = _VIEWER[1]) -> str:
    """A file's text. Raises FileNotFoundError for one that is not there."""
    return files(package).joinpath(folder, name).read_text(encoding="utf-8")


@cache
def page_template(package: str, folder: str) -> Template:
    """The page.html of a folder, which may include the viewer's parts."""
    loader = ChoiceLoader([PackageLoader(package, folder), PackageLoader(*_VIEWER)])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("page.html")
