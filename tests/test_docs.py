"""The documentation runs: every ```python block of a page, in order, in one namespace per page, in an empty directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Drafter, SamplingParams
from foredraft.testing import check_drafter

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))))
TUTORIAL = "docs/guides/adding-a-drafter.md"
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
NOT_RUN = "notest"
PROMPTS = ("def count_words(text):", "Once upon a time", "def area(width, height):\n    return")

DRAFTERS: dict[str, Callable[[dict[str, Any], int], Drafter]] = {
    "bigram": lambda names, vocab_size: names["BigramDrafter"](),
    "frequency": lambda names, vocab_size: names["FrequencyDrafter"](vocab_size),
}


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """(line in the page, code) of each block that is to run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if NOT_RUN not in match[1].split():
            yield text.count("\n", 0, match.start(2)), match[2]


@cache
def run_page(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page):
        # blank lines in front, so that a traceback gives the line of the page
        exec(compile("\n" * line + code, page, "exec"), names)
    return names


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return run_page(TUTORIAL)


@pytest.mark.parametrize("page", [page for page in PAGES if any(True for _ in blocks(page))])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_there_is_code_to_run() -> None:
    for page in ("README.md", TUTORIAL, "docs/guides/adding-a-verification-rule.md", "docs/internals/exactness.md"):
        assert list(blocks(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not ((ROOT / page).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_repository_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./])(?:src|tests|docs|benchmarks)/[\w./-]*\w", text)
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md"])
def test_every_benchmark_that_is_named_exists(page: str) -> None:
    named = re.findall(r"python -m (benchmarks\.[\w.]*\w)", (ROOT / page).read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_tutorials_drafters_keep_the_contract(drafter: str, tutorial: dict[str, Any]) -> None:
    check_drafter(lambda vocab_size: DRAFTERS[drafter](tutorial, vocab_size), invisible=False)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_tutorials_drafters_are_invisible(drafter: str, sampling: dict[str, Any], tutorial: dict[str, Any]) -> None:
    plain = LLM(method="none")
    drafted = LLM(method=DRAFTERS[drafter](tutorial, plain.target.traits.vocab_size), speculative_tokens=3)
    params = SamplingParams(max_tokens=32, **sampling)
    texts = [
        [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params)] for llm in (plain, drafted)
    ]
    assert drafted.engine.stats.num_draft_tokens > 0
    if plain.target.traits.row_exact:  # elsewhere only up to near ties
        assert texts[0] == texts[1]


def test_the_tutorials_sampling_drafter_earns_something(tutorial: dict[str, Any]) -> None:
    llm = LLM(method=tutorial["FrequencyDrafter"](4096), speculative_tokens=4)  # "auto" may find that it does not pay
    llm.generate(list(PROMPTS), SamplingParams(max_tokens=64, temperature=1.0))
    assert llm.engine.stats.num_accepted_tokens > 0
