"""A real browser to test the pages, and the display settings to test them in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True}
NARROW = {**PHONE, "viewport": {"width": 390, "height": 844}}
LOOKS = {"light": DESKTOP, "dark": {**DESKTOP, "color_scheme": "dark"}, "phone": PHONE}
BROKEN_NUMBERS = r"""() => {
    const found = [], range = document.createRange();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const parent = text.parentElement;
        if (!parent.checkVisibility() || parent.closest(".text, textarea, select, script")) continue;
        for (const match of text.data.matchAll(/\d[\d.,]*/g)) {
            range.setStart(text, match.index);
            range.setEnd(text, match.index + match[0].length);
            if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(match[0]);
        }
    }
    return found;
}"""
"""Finds numbers that are broken over several lines, except in text that models wrote."""
NO_WEBGL = """
    const given = HTMLCanvasElement.prototype.getContext;
    HTMLCanvasElement.prototype.getContext = function (kind, ...rest) {
        return kind.includes("webgl") ? null : given.call(this, kind, ...rest);
    };
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium. Skip the test where it is not installed, unless the environment requires it."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing = "no chromium here: apt-get install chromium"
        if os.environ.get("FOREDRAFT_NEEDS_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    # root in a container cannot use the sandbox; software WebGL, so that every machine renders the same
    options = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=options)
        yield opened
        opened.close()
