"""The page is a single file that is safe whatever a model wrote, and shows the contents of the trace."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from foredraft import ForedraftError
from foredraft.engine.stats import SpeculationStats
from foredraft.trace import page_of, read_trace, write_page
from foredraft.trace.charts import alpha_chart, histogram_chart
from foredraft.trace.three_js import three_js
from tests.trace.test_reader import Lines, sound, written

HOSTILE = "</script><script>window.bad=1</script><!-- <script> & \u2028\x00\x1b[31m\ufffd ]]> {{ 7 * 7 }} &lt;"


class Scripts(HTMLParser):
    """Collects the content of each script, and every address in a tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.addresses: list[str | None] = []
        self._is_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_script = tag == "script"
        if self._is_script:
            self.found.append((dict(attrs), ""))
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            attrs, text = self.found[-1]
            self.found[-1] = attrs, text + data


def data_of(page: str) -> dict[str, object]:
    (text,) = (text for attrs, text in Scripts(page).found if attrs.get("id") == "trace")
    found: dict[str, object] = json.loads(text)
    return found


def page(lines: Lines, folder: Path) -> str:
    return page_of(read_trace(written(lines, folder)))


def test_text_of_a_model_stays_data(tmp_path: Path) -> None:
    calm = len(Scripts(page(sound(), tmp_path)).found)
    lines = sound()
    lines[0].update(method=HOSTILE, foredraft=HOSTILE)
    lines[1].update(prompt=HOSTILE)
    for token in (lines[3]["draft"][0], lines[3]["own"]):
        token["text"] = HOSTILE
    text = page(lines, tmp_path)
    assert len(Scripts(text).found) == calm
    (found,) = data_of(text)["texts"]  # type: ignore[misc]
    assert found["prompt"] == HOSTILE
    assert found["rounds"][0]["own"]["text"] == HOSTILE
    assert "window.bad" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL).replace(
        "&lt;script&gt;window.bad", ""
    )


def test_the_page_makes_no_requests(tmp_path: Path) -> None:
    text = page(sound(), tmp_path)
    parsed = Scripts(text)
    assert all(address is None or address.startswith("#") for address in parsed.addresses)
    assert not any("src" in attrs for attrs, _ in parsed.found)
    assert "default-src 'none'" in text
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_the_data_is_the_trace(tmp_path: Path) -> None:
    found = data_of(page(sound(), tmp_path))
    (text,) = found["texts"]  # type: ignore[misc]
    assert [len(one["draft"]) for one in text["rounds"]] == [2, 0]
    assert len(found["steps"]) == 2  # type: ignore[arg-type]
    assert found["counts"]["num_accepted_tokens"] == 1  # type: ignore[index]


def test_an_incomplete_recording_is_shown_as_such(tmp_path: Path) -> None:
    assert "recording ended early" not in page(sound(), tmp_path)
    assert "recording ended early" in page(sound()[:-2], tmp_path)


def test_nothing_to_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="has no text"):
        page(sound()[:1], tmp_path)


def test_an_unwritable_page_is_reported(tmp_path: Path) -> None:
    trace = read_trace(written(sound(), tmp_path))
    with pytest.raises(ForedraftError, match="cannot be written: No such file"):
        write_page(trace, tmp_path / "nowhere" / "page.html")


def test_the_library_is_complete_and_has_its_licence() -> None:
    library = three_js()
    assert "Three.js Authors" in library[:100]
    assert "SPDX-License-Identifier: MIT" in library[:200]
    assert "TrackballControls" not in library
    assert "</script" not in library.lower()


def test_the_charts_show_the_counts() -> None:
    stats = SpeculationStats()
    for accepted in (0, 1, 2, 2):
        stats.record(num_drafted=2, num_accepted=accepted, num_kept=accepted + 1)
    alpha, histogram = alpha_chart(stats), histogram_chart(stats)
    assert ">0.75<" in alpha  # of four first draft tokens three were accepted
    assert ">0.67<" in alpha  # of three second ones two were accepted
    assert all(f">{count}<" in histogram for count in (1, 2))
    for svg in (alpha, histogram):
        assert svg.startswith("<svg aria-hidden")
        assert "var(--accepted-line)" in svg
        assert "#04" not in svg
