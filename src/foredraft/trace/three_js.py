"""three.js, taken from the viewer of the installed trimesh package, so this repository has no third-party code."""

from __future__ import annotations

from importlib.resources import files
from io import BytesIO
from zipfile import ZipFile

from foredraft.errors import ForedraftError

_BEGIN = "/**\n * @license\n * Copyright 2010-2022 Three.js Authors"
_NEXT = "class TrackballControls"  # the first of the add-ons after the library, each of which is in its own function
_FUNCTION = "(function(){"


def three_js() -> str:
    """The library with its licence notice, as a classic script that defines THREE.

    Raises ForedraftError if the installed trimesh does not have it.
    """
    archive = files("trimesh").joinpath("resources", "templates", "viewer.zip")
    with ZipFile(BytesIO(archive.read_bytes())) as opened:
        page = opened.read("viewer.html.template").decode()
    begin, following = page.find(_BEGIN), page.find(_NEXT)
    end = page.rfind(_FUNCTION, 0, following)
    if not 0 <= begin < end:
        raise ForedraftError("the installed trimesh has no three.js in a known format: install trimesh>=5.2,<6")
    return page[begin:end]
