"""What recording costs, and how long a browser takes to show a long trace.

python -m benchmarks.trace.page [--tokens 2000] [--loads 15] [--picture docs/images/trace.png]

Needs chromium, and `pip install '.[dev]'`. --picture: also take the documentation's screenshot.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from foredraft import LLM, SamplingParams
from foredraft.tools.demo import DEMO_PROMPT
from foredraft.trace import read_trace, record, write_page

_READY = "html[data-ready]"
_STORY = "Once upon a time"
_TO_A_TELLING_ROUND = """() => {
    const seek = document.getElementById("seek");
    const tells = (round) => Data.acceptedOf(round).length > 1 && Data.rejectedOf(round);
    seek.value = 1 + Data.texts[0].rounds.findIndex((round, index) => index > 3 && tells(round));
    seek.dispatchEvent(new Event("input"));
}"""


def recorded(llm: LLM, prompt: str, params: SamplingParams, folder: Path) -> Path:
    with record(llm, folder / "trace.jsonl"):
        llm.generate(prompt, params)
    return write_page(read_trace(folder / "trace.jsonl"), folder / "trace.html")


def cost_of_recording(llm: LLM, folder: Path, num_runs: int = 7) -> tuple[float, float]:
    """Seconds of a generation without and with recording, medians of alternating runs."""
    params = SamplingParams(max_tokens=256, temperature=1.0, seed=1, ignore_eos=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(num_runs):
        for is_recorded in times:
            began = time.perf_counter()
            with record(llm, folder / "cost.jsonl") if is_recorded else nullcontext():
                llm.generate(_STORY, params)
            times[is_recorded].append(time.perf_counter() - began)
    return statistics.median(times[False]), statistics.median(times[True])


def load_times(browser: Browser, page_file: Path, num_loads: int) -> list[float]:
    """Milliseconds from the start of the navigation to the first complete page, each in a new browser context."""
    times = []
    for _ in range(num_loads):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector(_READY)
        times.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))
        context.close()
    return times


def take_picture(browser: Browser, page_file: Path, picture: Path) -> None:
    page = browser.new_page(viewport={"width": 1180, "height": 1320})
    page.goto(page_file.as_uri())
    page.wait_for_selector(_READY)
    page.evaluate(_TO_A_TELLING_ROUND)
    page.screenshot(path=picture)
    # a palette is enough for this page, and takes a third of the bytes
    Image.open(picture).convert("RGB").quantize(192).save(picture, optimize=True)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--loads", type=int, default=15)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    llm = LLM(seed=1, speculative_tokens=4)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        plain, with_record = cost_of_recording(llm, folder)
        print(f"recording: {plain:.3f} s without, {with_record:.3f} s with (256 tokens, medians of 7)")
        page = recorded(llm, _STORY, SamplingParams(max_tokens=asked.tokens, temperature=1.0, ignore_eos=True), folder)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times = load_times(browser, page, asked.loads)
        print(
            f"{asked.tokens} tokens, {page.stat().st_size / 2**20:.1f} MiB: ready after "
            f"{statistics.median(times):.0f} ms, {min(times):.0f} to {max(times):.0f} (median and range of {len(times)})"
        )
        if asked.picture:
            sampled = SamplingParams(max_tokens=128, temperature=0.4, top_p=0.95)
            shown = recorded(LLM(seed=4, speculative_tokens=4), DEMO_PROMPT, sampled, folder)
            take_picture(browser, shown, asked.picture)
            print(f"{asked.picture}: {asked.picture.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
