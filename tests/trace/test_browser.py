"""The trace page in a real browser, opened from disk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from foredraft import LLM, RequestOutput, SamplingParams
from foredraft.engine.stats import SpeculationStats
from foredraft.trace import read_trace, record, write_page
from tests.browsing import ARTIFACTS, BROKEN_NUMBERS, DESKTOP, LOOKS, NARROW, NO_WEBGL, chromium
from tests.trace.test_reader import sound, written
from tests.trace.test_view import HOSTILE

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

CODE, STORY = "def read_lines(path):", "Once upon a time </script> <b>there & was"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def outputs_and_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RequestOutput], Path]:
    """The outputs and the page of a batch: two texts sampled from one prompt, one greedy text, and one without drafts."""
    llm = LLM(seed=7, speculative_tokens=4)
    folder = tmp_path_factory.mktemp("page")
    params = [
        SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95, n=2, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=0.0, speculative_tokens=0),
    ]
    with record(llm, folder / "trace.jsonl"):
        outputs = llm.generate([CODE, STORY, STORY], params)
    return outputs, write_page(read_trace(folder / "trace.jsonl"), folder / "trace.html")


@pytest.fixture
def open_page(browser: Any, outputs_and_page: tuple[list[RequestOutput], Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page in a browser where requests other than for the file fail, and asserts that there are no errors on the console."""
    contexts, faults = [], []

    def refuse(route: Any) -> None:
        faults.append(f"asked for {route.request.url}")
        route.abort()

    def opened(path: Path = outputs_and_page[1], **settings: Any) -> Any:
        context = browser.new_context(**{**DESKTOP, **settings})
        contexts.append(context)
        context.route(lambda url: url != path.as_uri(), refuse)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def round_name(page: Any) -> str:
    return str(page.inner_text("#round-name"))


def counts_of(page: Any) -> dict[str, tuple[str, str]]:
    """By name: (the count of this text, the count of all texts)"""
    rows = page.eval_on_selector_all("#counts tr", "rows => rows.map(r => [...r.cells].map(c => c.textContent))")
    return {name: (own, every) for name, own, every in rows}


def as_shown(stats: SpeculationStats) -> dict[str, str]:
    """Counts as JavaScript formats a number or a list, without near ties, which a trace does not contain."""
    found = asdict(stats)
    del found["num_near_ties"]
    return {name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in found.items()}


def picture(page: Any) -> Image.Image:
    return Image.open(io.BytesIO(page.locator("#stage canvas").screenshot())).convert("RGB")


def test_the_pages_counts_are_those_of_the_run(open_page: Callable[..., Any], outputs_and_page: Any) -> None:
    outputs, _ = outputs_and_page
    page = open_page()
    every = sum((output.metrics.stats for output in outputs), SpeculationStats())
    shown: list[dict[str, str]] = []
    for value in range(4):
        page.select_option("#text-choice", str(value))
        counts = counts_of(page)
        assert {name: both[1] for name, both in counts.items()} == as_shown(every)
        shown.append({name: both[0] for name, both in counts.items()})
    single = [as_shown(output.metrics.stats) for output in outputs if len(output.outputs) == 1]
    assert all(wanted in shown for wanted in single)
    emitted = sorted(int(one["num_emitted_tokens"]) for one in shown)
    assert emitted == sorted(len(text.token_ids) for output in outputs for text in output.outputs)


def test_the_pages_text_is_the_output(open_page: Callable[..., Any], outputs_and_page: Any) -> None:
    outputs, _ = outputs_and_page
    page = open_page()
    found = set()
    for value in range(4):
        page.select_option("#text-choice", str(value))
        found.add(
            page.evaluate(
                """() => [...document.querySelectorAll("#tokens > :not(.rejected)")].map((option) => {
                    const bare = option.cloneNode(true);
                    bare.querySelectorAll(".ws").forEach((mark) => mark.remove());
                    return bare.textContent;
                }).join("")"""
            )
        )
    assert found == {text.text for output in outputs for text in output.outputs}


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_accessible(look: str, open_page: Callable[..., Any]) -> None:
    page = open_page(**LOOKS[look])
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    found = axe_playwright.Axe().run(page).response["violations"]
    assert [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in found] == []


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_fits_the_window(look: str, open_page: Callable[..., Any]) -> None:
    page = open_page(**LOOKS[look])
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= LOOKS[look]["viewport"]["width"]
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = false; })")
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"trace-{look}.png", full_page=True)


@pytest.mark.parametrize("width", [320, 390])
def test_numbers_are_not_broken_over_lines_on_a_phone(width: int, open_page: Callable[..., Any]) -> None:
    page = open_page(**{**NARROW, "viewport": {"width": width, "height": 844}})
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"trace-{width}.png", full_page=True)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate(BROKEN_NUMBERS) == []
    if width >= 390:  # the verdicts are in the last column
        assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.round .scroll'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_dark_mode_is_dark(open_page: Callable[..., Any]) -> None:
    brightness = []
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        shot = Image.open(io.BytesIO(page.screenshot())).convert("L").resize((1, 1))
        brightness.append(shot.getpixel((0, 0)))
    assert brightness[0] > 200
    assert brightness[1] < 60


def test_keys_play_and_step(open_page: Callable[..., Any]) -> None:
    page = open_page(reduced_motion="reduce")  # steps are shown at once
    page.keyboard.press("Home")
    assert round_name(page).startswith("Round 1 of")
    phases = []
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        phases.append((round_name(page).split()[1], page.inner_text("#phase")))
    assert phases == [("1", "accept"), ("2", "draft"), ("2", "verify"), ("2", "accept")]
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#phase") == "verify"
    page.keyboard.press("Shift+ArrowRight")
    assert round_name(page).startswith("Round 3 of")
    page.keyboard.press("Shift+ArrowLeft")
    assert round_name(page).startswith("Round 2 of")
    page.keyboard.press("End")
    _, number, _, count = round_name(page).split()
    assert number == count
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Pause"
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Play"


def test_every_control_can_be_reached_by_tab(open_page: Callable[..., Any]) -> None:
    page = open_page()
    wanted = page.eval_on_selector_all(
        "button, select, input, summary, [tabindex='0']",
        "all => all.filter(one => one.checkVisibility()).map(one => one.id || one.className || one.tagName)",
    )
    reached = set()
    for _ in range(len(wanted) + 4):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(e => e.id || e.className || e.tagName)(document.activeElement)"))
    assert set(wanted) <= reached


def test_the_text_can_be_stepped_through_token_by_token(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.focus("#tokens [tabindex='0']")
    page.keyboard.press("Home")
    first = page.evaluate("document.activeElement.textContent")
    assert page.is_visible("#tip")
    assert "token id" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('#tokens > *')[1]")
    page.keyboard.press("End")
    number, count = round_name(page).split()[1::2]
    assert number == count
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.textContent") == first
    assert page.locator("#tokens [tabindex='0']").count() == 1


def test_a_token_and_a_bar_lead_to_their_round(open_page: Callable[..., Any]) -> None:
    page = open_page()
    token = page.locator("#tokens .rejected").nth(2)
    token.hover()
    tip = page.inner_text("#tip")
    assert "rejected, round" in tip
    assert "q " in tip
    assert "p " in tip
    token.click()
    assert f"round {round_name(page).split()[1]}," in tip
    assert token.get_attribute("aria-selected") == "true"
    page.locator("#timeline").click(position={"x": 2, "y": 100})
    assert round_name(page).startswith("Round 1 of")


def test_rejected_tokens_can_be_hidden(open_page: Callable[..., Any]) -> None:
    page = open_page()
    rejected = page.locator("#tokens .rejected")
    assert rejected.count() > 0
    assert rejected.first.is_visible()
    page.uncheck("#show-rejected")
    assert rejected.first.is_hidden()


def test_the_replay_is_drawn_and_moves(open_page: Callable[..., Any]) -> None:
    page = open_page(reduced_motion="reduce")
    page.keyboard.press("Home")
    verified = picture(page)
    assert len(verified.getcolors(maxcolors=1 << 24)) > 200
    page.keyboard.press("ArrowRight")
    assert picture(page).tobytes() != verified.tobytes()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[RequestOutput, Path]:
    """The output of a text drafted with trees, and its page."""
    llm = LLM(seed=7, speculative_token_tree=[[0], [1], [0, 0], [0, 1], [1, 0]])
    folder = tmp_path_factory.mktemp("trees")
    with record(llm, folder / "trace.jsonl"):
        (output,) = llm.generate(STORY, SamplingParams(max_tokens=48, temperature=0.9, ignore_eos=True))
    return output, write_page(read_trace(folder / "trace.jsonl"), folder / "trace.html")


def test_branches_are_described_and_counted(open_page: Callable[..., Any], trees: tuple[RequestOutput, Path]) -> None:
    output, file = trees
    page = open_page(file)
    assert {name: own for name, (own, _) in counts_of(page).items()} == as_shown(output.metrics.stats)
    page.keyboard.press("Home")
    assert "5 drafted in a tree of 3 branches" in page.inner_text("#round-said")
    names = page.eval_on_selector_all("#round-rows td:first-child", "cells => cells.map(c => c.textContent)")
    assert [name.startswith("└ ") for name in names[:5]] == [False, False, True, True, True]
    assert "in a tree" in page.get_attribute("#stage", "aria-label")


def test_branches_are_drawn_side_by_side(open_page: Callable[..., Any], trees: tuple[RequestOutput, Path]) -> None:
    """One lane is the branch that the text took. No two tokens overlap, and lines connect each token with the one before."""
    page = open_page(trees[1], reduced_motion="reduce")
    rounds = page.evaluate(
        """() => JSON.parse(document.getElementById("trace").textContent).texts[0].rounds.map((round) => ({
            lanes: Data.lanesOf(round), depths: Data.depthsOf(round), verdicts: round.draft.map((token) => token.verdict),
            joined: Moment.items(round, undefined, [], 0.5, 0).filter((item) => item.behind).length,
        }))"""
    )
    for each in (each for each in rounds if each["lanes"]):
        assert len(set(zip(each["lanes"], each["depths"], strict=True))) == len(each["lanes"])
        accepted = [
            lane for lane, verdict in zip(each["lanes"], each["verdicts"], strict=True) if verdict == "accepted"
        ]
        assert set(accepted) <= {0}
        assert max(each["lanes"]) >= 1
        assert each["joined"] == sum(depth > 0 for depth in each["depths"])
    assert len(picture(page).getcolors(maxcolors=1 << 24)) > 200


def test_playing_goes_on_by_itself(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.keyboard.press("Home")
    page.select_option("#speed", "8")
    page.click("#play")
    playwright.expect(page.locator("#round-name")).not_to_contain_text("Round 1 of")
    page.click("#play")
    assert page.inner_text("#play") == "Play"


def test_without_webgl_rounds_are_described_in_words(browser: Any, outputs_and_page: Any) -> None:
    context = browser.new_context(**DESKTOP)
    context.add_init_script(script=NO_WEBGL)
    page = context.new_page()
    page.goto(outputs_and_page[1].as_uri())
    page.wait_for_selector("html[data-ready]")
    assert "no WebGL" in page.inner_text("#stage")
    page.keyboard.press("End")
    assert page.inner_text("#round-said")
    context.close()


def test_html_in_a_text_is_not_run(open_page: Callable[..., Any], tmp_path: Path) -> None:
    lines = sound()
    lines[1].update(prompt=HOSTILE)
    lines[3]["own"]["text"] = HOSTILE
    page = open_page(write_page(read_trace(written(lines, tmp_path)), tmp_path / "page.html"))
    assert page.evaluate("window.bad") is None
    assert "</script><script>window.bad=1</script>" in page.inner_text("#prompt")
    assert "{{ 7 * 7 }}" in page.inner_text("#tokens")


def test_a_recording_without_drafts_or_probabilities_is_shown(open_page: Callable[..., Any], tmp_path: Path) -> None:
    lines = sound()[:4]
    lines[3].update(draft=[], own={"id": 9, "text": "", "p": None, "p_raw": None, "origin": "plain"})
    page = open_page(write_page(read_trace(written(lines, tmp_path)), tmp_path / "page.html"))
    assert "Nothing was drafted" in page.inner_text("main")
    assert "recording ended early" in page.inner_text("main")
    assert "#9" in page.inner_text("#round-rows")
