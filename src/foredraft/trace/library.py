"""three.js, from the installed trimesh package, whose own viewer brings it: no third-party text lies in this repository."""

from __future__ import annotations

from importlib.resources import files
from io import BytesIO
from zipfile import ZipFile

from foredraft.errors import ForedraftError

_BEGIN = "/**\n * @license\n * Copyright 2010-2022 Three.js Authors"
_NEXT = "class TrackballControls"  # of the add-ons that follow the library, each in a function of its own
_FUNCTION = "(function(){"


def three_js() -> str:
    """The library, licence notice included: a classic script that defines THREE.

    Raises ForedraftError if the installed trimesh brings none.
    """
    archive = files("trimesh").joinpath("resources", "templates", "viewer.zip")
    with ZipFile(BytesIO(archive.read_bytes())) as opened:
        page = opened.read("viewer.html.template").decode()
    begin, following = page.find(_BEGIN), page.find(_NEXT)
    end = page.rfind(_FUNCTION, 0, following)
    if not 0 <= begin < end:
        raise ForedraftError("the installed trimesh brings no three.js that is known here: install trimesh>=5.2,<6")
    return page[begin:end]
