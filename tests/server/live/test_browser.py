"""The live page in a real browser, served by a real server with the embedded pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.engine.sequence import Origin
from tests.browsing import ARTIFACTS, BROKEN_NUMBERS, DESKTOP, LOOKS, NARROW, NO_WEBGL, chromium
from tests.server.conftest import SETTINGS, Running, running
from tests.trace.test_view import HOSTILE

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

PROMPT = "def binary_search(items, target):"
KEY = "a key that nobody guesses"
CHARTS = ("throughput", "alpha", "tau", "gamma")
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm, replace(SETTINGS, show_text=True)) as found:
        yield found


@pytest.fixture
def open_page(browser: Any, server: Running) -> Iterator[OpenPage]:
    """Opens the page in a browser where requests to other hosts fail, and asserts that there are no unexpected errors on the console,
    where violations of the page's policy are reported too. expected: parts of messages that a test causes."""
    contexts, faults, allowed = [], [], []

    def opened(url: str = server.url, *, expected: tuple[str, ...] = (), script: str = "", **settings: Any) -> Any:
        context = browser.new_context(**{**DESKTOP, **settings})
        contexts.append(context)
        allowed.extend(expected)

        def refuse(route: Any) -> None:
            faults.append(f"asked for {route.request.url}")
            route.abort()

        context.route(lambda asked: not asked.startswith((f"{url}/", "data:image/svg+xml")), refuse)
        if script:
            context.add_init_script(script=script)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(f"{url}/")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [fault for fault in faults if not any(part in fault for part in allowed)] == []


def ready(page: Any) -> Any:
    page.wait_for_selector("html[data-ready]")
    return page


def ask(page: Any, prompt: str, *, max_tokens: int, temperature: float = 0.0) -> None:
    page.fill("#prompt-text", prompt)
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#temperature", str(temperature))
    page.click("#write")


def newest(page: Any) -> Any:
    return page.locator("#texts .written").first


def await_end(page: Any, num_tokens: int) -> None:
    playwright.expect(newest(page).locator(".written-head")).to_contain_text(f"{num_tokens} tokens", timeout=60_000)
    playwright.expect(newest(page).locator(".written-head")).to_contain_text("ended")
    playwright.expect(page.locator("#trial-said")).to_contain_text("Done")


def lines(page: Any) -> dict[str, str]:
    return {name: page.get_attribute(f"#chart-{name} .line", "d") or "" for name in CHARTS}


def written_tokens(page: Any) -> list[tuple[str, str]]:
    """(kind, characters) of each token of the newest text."""
    return [
        tuple(pair)
        for pair in newest(page)
        .locator(".tok")
        .evaluate_all(
            """all => all.map((token) => {
                const bare = token.cloneNode(true);
                bare.querySelectorAll(".ws").forEach((mark) => mark.remove());
                return [token.className.replace("tok ", ""), bare.textContent];
            })"""
        )
    ]


def test_a_submitted_prompt_is_shown_coloured_and_the_charts_move(
    open_page: OpenPage, server: Running, llm: LLM
) -> None:
    page = ready(open_page())
    before = lines(page)
    ask(page, PROMPT, max_tokens=300)
    newest(page).locator(".tok.accepted").first.wait_for()
    playwright.expect(page.locator("#state")).to_contain_text("Drafting")
    await_end(page, 300)
    playwright.expect(page.locator("#round-name")).to_contain_text(re.compile(r"Round \d+ of \d+"))
    playwright.expect(page.locator("#others")).to_be_hidden()
    server.wait_until_idle()
    page.wait_for_timeout(1200)  # wait for the last sample
    after = lines(page)
    for name in CHARTS:
        assert len(after[name]) > len(before[name]), name
        assert "now" in (page.get_attribute(f"#chart-{name} svg", "aria-label") or "")
    assert "· 0 a second" not in page.inner_text("#texts")

    shown = written_tokens(page)
    page.click("#all-counts summary")
    counts = dict(
        page.eval_on_selector_all("#counts tr", "rows => rows.map(r => [r.dataset.count, r.cells[1].textContent])")
    )
    for name, value in asdict(llm.engine.stats).items():
        if name in counts:
            assert counts[name] == str(value), name
    page.click("#all-counts summary")
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / "live-typed.png", full_page=True)

    (offline,) = llm.generate([PROMPT], SamplingParams(max_tokens=300, temperature=0.0))
    (text,) = offline.outputs
    assert [kind for kind, _ in shown] == [Origin(origin).name.lower() for origin in text.origins]
    assert "".join(characters for _, characters in shown) == text.text
    assert {kind for kind, _ in shown} >= {"accepted", "recovered", "bonus"}


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_fits_and_is_accessible(look: str, open_page: OpenPage) -> None:
    page = ready(open_page(**LOOKS[look]))
    ask(page, PROMPT, max_tokens=150, temperature=0.7)
    newest(page).locator(".tok").first.wait_for()
    playwright.expect(page.locator("#trial-said")).to_contain_text("Done", timeout=60_000)
    page.screenshot(path=ARTIFACTS / f"live-{look}.png", full_page=True)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= LOOKS[look]["viewport"]["width"]
    found = axe_playwright.Axe().run(page).response["violations"]
    assert [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in found] == []


@pytest.mark.parametrize("width", [320, 390])
def test_numbers_are_not_broken_over_lines_on_a_phone(width: int, open_page: OpenPage) -> None:
    """Whatever number of digits they have."""
    page = ready(open_page(**{**NARROW, "viewport": {"width": width, "height": 844}}))
    ask(page, PROMPT, max_tokens=50)
    await_end(page, 50)
    page.screenshot(path=ARTIFACTS / f"live-{width}.png", full_page=True)
    broken = page.evaluate(
        f"""() => {{
            document.querySelectorAll("details").forEach((one) => {{ one.open = true; }});
            document.querySelectorAll(".chart output").forEach((one) => {{ one.textContent = "123,456.78"; }});
            document.querySelectorAll(".figures dd").forEach((one) => {{ one.firstChild.data = "123,456.7"; }});
            return ({BROKEN_NUMBERS})();
        }}"""
    )
    assert broken == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_can_be_reached_by_tab_and_a_key_submits(open_page: OpenPage) -> None:
    page = ready(open_page(reduced_motion="reduce"))
    page.focus("#prompt-text")
    page.keyboard.type("Once upon")
    page.fill("#max-tokens", "20")
    page.focus("#prompt-text")
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#trial-said")).to_contain_text("Done", timeout=60_000)
    wanted = page.eval_on_selector_all(
        "button:not(:disabled), select, input, textarea, summary, [tabindex='0']",
        "all => all.filter(one => one.checkVisibility()).map(one => one.id || one.className || one.tagName)",
    )
    reached = set()
    for _ in range(len(wanted) + 10):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(e => e.id || e.className || e.tagName)(document.activeElement)"))
    assert set(wanted) <= reached


def test_stop_ends_the_request(open_page: OpenPage, server: Running) -> None:
    page = ready(open_page())
    ask(page, PROMPT, max_tokens=1500)  # a text without an end
    newest(page).locator(".tok").first.wait_for()
    page.click("#stop")
    playwright.expect(page.locator("#trial-said")).to_contain_text("Stopped")
    playwright.expect(newest(page).locator(".written-head")).to_contain_text("ended: abort")
    server.wait_until_idle()


def test_the_servers_errors_are_shown(open_page: OpenPage) -> None:
    page = ready(open_page(expected=("status of 400",)))
    ask(page, "word " * 3000, max_tokens=10)
    playwright.expect(page.locator("#trial-said")).to_contain_text("Refused")
    playwright.expect(page.locator("#trial-said")).to_contain_text("tokens")


def test_html_in_a_text_is_not_run(open_page: OpenPage) -> None:
    page = ready(open_page())
    ask(page, HOSTILE.replace("\x00", ""), max_tokens=5)
    playwright.expect(newest(page)).to_contain_text("<script>window.bad=1</script>")
    assert page.evaluate("window.bad") is None


def test_without_webgl_rounds_are_described_in_words(open_page: OpenPage) -> None:
    page = ready(open_page(script=NO_WEBGL, expected=("Error creating WebGL context",)))
    for _ in range(30):  # rounds are only reported while that takes the engine little time
        ask(page, PROMPT, max_tokens=60)
        playwright.expect(page.locator("#trial-said")).to_contain_text("Done", timeout=60_000)
        page.wait_for_timeout(300)
        if page.inner_text("#round-said"):
            break
    playwright.expect(page.locator("#round-said")).not_to_be_empty()
    assert "no WebGL" in page.inner_text("#stage")


def test_the_page_asks_for_the_key_and_does_not_store_it(open_page: OpenPage, llm: LLM) -> None:
    with running(llm, replace(SETTINGS, api_key=KEY, show_text=True)) as guarded:
        page = open_page(guarded.url, expected=("status of 401",))
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "another")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#key-said")).to_contain_text("not accepted")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        ready(page)
        playwright.expect(page.locator("#link")).to_have_text("Live")
        ask(page, PROMPT, max_tokens=20)
        newest(page).locator(".tok").first.wait_for()
        assert KEY not in page.content()
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert page.url == f"{guarded.url}/"
        page.reload()
        page.wait_for_selector("#key-form:not([hidden])")


def test_texts_are_not_shown_without_show_text(open_page: OpenPage, llm: LLM) -> None:
    with running(llm, replace(SETTINGS, show_text=False)) as discreet:
        page = ready(open_page(discreet.url))
        ask(page, PROMPT, max_tokens=40)
        newest(page).locator(".tok.accepted").first.wait_for()
        playwright.expect(page.locator("#trial-said")).to_contain_text("Done", timeout=60_000)
        assert {characters for _, characters in written_tokens(page)} == {""}
        assert "binary_search" not in page.inner_text("#texts")
        (offline,) = llm.generate([PROMPT], SamplingParams(max_tokens=40, temperature=0.0))
        assert page.locator("#answer").text_content() == offline.outputs[0].text  # the user's own text is shown


def test_the_page_reports_a_lost_server_and_does_not_keep_it_from_ending(open_page: OpenPage, llm: LLM) -> None:
    with running(llm, replace(SETTINGS, show_text=True)) as brief:
        page = ready(open_page(brief.url, expected=("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "status of 503")))
    # the server ended although the page was watching
    playwright.expect(page.locator("#link")).to_contain_text("Connection lost")
