"""The documentation's code works: each page's Python runs in one namespace, commands run in a temporary directory, and settings and
requests are valid."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from foredraft import LLM, Drafter, SamplingParams
from foredraft.cli import app
from foredraft.model import EMBEDDED
from foredraft.server import ServerSettings, create_app
from foredraft.settings import Settings
from foredraft.testing import check_drafter
from tests.heads.random_heads import embedded_head

ROOT = Path(__file__).parents[1]
DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", *DOCS)
TUTORIAL = "docs/guides/adding-a-drafter.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\(|^\[\w+\]: )([^)#:\s]*)(?:#([^):\s]*))?(?:\)|$)", re.MULTILINE)
LANGUAGES = {"python", "sh", "toml", "json", "text"}
WIDTH = 120
PROMPTS = ("def count_words(text):", "Once upon a time", "def area(width, height):\n    return")

DRAFTERS: dict[str, Callable[[dict[str, Any], int], Drafter]] = {
    "bigram": lambda names, vocab_size: names["BigramDrafter"](),
    "nearest state": lambda names, vocab_size: names["NearestStateDrafter"](),
    "frequency": lambda names, vocab_size: names["FrequencyDrafter"](vocab_size),
}

PYTHON_NOT_RUN = {
    "import openai": "needs a running server; tests/server/test_openai_client.py has one",
    'from foredraft import LLM\n\nllm = LLM("meta-llama/': "needs the hub",
    '"bigram": ("BigramDrafter",),': "lines of two tables",
    'from foredraft import LLM, SamplingParams\n\nllm = LLM("model.gguf"': "needs files that are not part of the repository",
}
"""Python blocks that are not run, by their beginning, with the reason."""

NOT_RUN = {
    "make": "sets up the environment, and runs this very suite",
    "pip": "installs packages",
    "ray": "needs a cluster",
    "torchrun": "starts several processes; tests/model/test_tensor_parallel.py does",
    "serve run": "needs vLLM",
    "export": "sets what only a cluster reads",
    "python": "takes minutes, and corpora that are not part of the repository",
    "foredraft check": "its verdict depends on the time that it gets; tests/certificate/ runs it",
    "foredraft draft-server": "runs until it is stopped; tests/cli/test_draft_server.py starts one",
    "foredraft serve": "runs until it is stopped; tests/server/test_command.py starts one",
}
"""Commands that are not run, by their beginning, with the reason."""
NOT_RUN_WORDS = {
    "--pairs": "needs an encoder-decoder; tests/train/test_pairs.py and test_decoder_head.py run such commands",
    "Qwen/": "needs the hub",
    "HuggingFaceTB/": "needs the hub",
    "meta-llama/": "needs the hub",
    "zai-org/": "needs the hub",
    "--draft-model decoder": "needs an encoder-decoder; tests/train/test_decoder_head.py runs such a command",
    "--model models/": "needs what `make models` downloads; tests with the mark real_model have it",
    "CHAT_MODEL": "takes hours, and a model that has a chat template; tests/train/test_chats.py has it",
    "tcp://": "needs a draft server; tests/cli/test_draft_server.py has one",
    ".gguf": "needs a file that is not part of the repository",
    "networkx.txt.gz": "takes ten minutes, and a corpus that is not part of the repository",
}
"""Commands that are not run, by a word that they contain, with the reason."""
LONG = ("foredraft bench", "foredraft tune", "foredraft train")
"""Commands that run with the slow tests only."""

MODELS = {
    **dict.fromkeys(("TARGET", "T", "M"), str(EMBEDDED / "target")),
    **dict.fromkeys(("DRAFT", "D"), str(EMBEDDED / "draft")),
}
"""The models that placeholders in commands stand for."""
SHORTER = {"10m": "4s", "2h": "4s", "2m": "12s", "1m": "8s"}
"""Shorter budgets for the tests."""
FEWER = {"18000": "4"}
"""Fewer generations for the tests."""
HEADS = {"HEAD": "eagle", "MEDUSA": "medusa"}
"""The methods of the heads that placeholders in commands stand for."""


class Block(NamedTuple):
    line: int
    language: str
    code: str


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[Block]:
    text = text_of(page)
    found = [Block(text.count("\n", 0, match.start(2)), match[1], match[2]) for match in BLOCK.finditer(text)]
    return [block for block in found if block.language == language]


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


# python


def python_of(page: str) -> list[Block]:
    return [block for block in blocks(page, "python") if not block.code.startswith(tuple(PYTHON_NOT_RUN))]


@cache
def run_page(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in python_of(page):
        # blank lines first, so that a traceback gives the line in the page
        exec(compile("\n" * block.line + block.code, page, "exec"), names)
    return names


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return run_page(TUTORIAL)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_pages_that_should_have_python_have_some() -> None:
    for page in ("README.md", TUTORIAL, "docs/guides/adding-a-verification-rule.md", "docs/internals/exactness.md"):
        assert python_of(page)


@pytest.mark.parametrize("beginning", PYTHON_NOT_RUN)
def test_every_python_exception_matches_one_block(beginning: str) -> None:
    code = [block.code for page in PAGES for block in blocks(page, "python")]
    assert sum(one.startswith(beginning) for one in code) == 1


# commands


def commands(page: str) -> Iterator[str]:
    """The commands in a page's blocks, one line each, without comments."""
    for block in blocks(page, "sh"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield shlex.join(words).replace("'|'", "|")


def parts(command: str) -> tuple[str | None, list[str]]:
    """(standard input, words), without leading variable assignments."""
    given, _, rest = command.rpartition(" | ")
    words = shlex.split(rest)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    return (shlex.split(given)[1] + "\n" if given else None), words


def reason_not_to_run(command: str) -> str | None:
    beginning = shlex.join(parts(command)[1])
    by_word = [why for word, why in NOT_RUN_WORDS.items() if word in command]
    by_beginning = [why for start, why in NOT_RUN.items() if f"{beginning} ".startswith(f"{start} ")]
    return next(iter([*by_beginning, *by_word]), None)


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]
RUN = [
    pytest.param(page, command, marks=[pytest.mark.slow] if command.startswith(LONG) else [], id=command[:70])
    for command, page in {command: page for page, command in reversed(COMMANDS)}.items()
    if reason_not_to_run(command) is None
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory with the files that the pages' commands read."""
    monkeypatch.chdir(tmp_path)
    documents = [f"Once upon a time there were {i} birds.\n" + "They sang all day long. " * 60 for i in range(40)]
    text = "<|endoftext|>".join(documents)
    for name in ("mine.txt.gz", "a.txt.gz"):
        Path(name).write_bytes(gzip.compress(text.encode()))
    Path("held_out.txt").write_text(text.replace("birds", "frogs").replace("sang", "slept"))
    Path("b.jsonl").write_text("".join(json.dumps({"text": f"{one} End."}) + "\n" for one in documents[:4]))
    questions = ("def mean(values):", "Once upon a time", "import os", "class Queue:")
    Path("questions.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in questions))
    Path("schema.json").write_text('{"type": "array", "items": {"type": "integer"}, "maxItems": 3}')
    Path("sums.lark").write_text('start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,3}/\n')
    Path("foredraft.toml").write_text('method = "suffix"\nspeculative_tokens = 2\n')
    shutil.copy(EMBEDDED / "draft" / "config.json", "config.json")
    return tmp_path


def fill_in(words: list[str]) -> list[str]:
    smaller = {"--budget": SHORTER, "--generations": FEWER}
    shorter = [smaller.get(before, {}).get(word, word) for before, word in pairwise(["", *words])]
    filled = [str(embedded_head(HEADS[word])) if word in HEADS else MODELS.get(word, word) for word in shorter]
    if words[1] in ("bench", "tune") and "--budget" not in words:
        filled += ["--budget", "3s"]
    return [*filled, "--overwrite"] if words[1] == "tune" else filled


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), RUN)
def test_a_command_runs(page: str, command: str, workplace: Path) -> None:
    given, words = parts(command)
    assert words[0] == "foredraft"
    if words[1:3] == ["trace", "view"]:
        before = next(one for one in commands(page) if f"--trace {words[3]}" in one)
        test_a_command_runs(page, before, workplace)
    found = CliRunner().invoke(app, fill_in(words)[1:], input=given)
    assert found.exit_code == 0, f"{found.output}\n{found.exception!r}"


@pytest.mark.parametrize(("page", "command"), [pair for pair in COMMANDS if "foredraft " in pair[1]])
def test_a_command_can_be_parsed(page: str, command: str, workplace: Path) -> None:
    """Also commands that are not run: every option exists and accepts its value."""
    parser, words = typer.main.get_command(app), parts(command)[1]
    if "foredraft" in words:  # also after "torchrun ... -m"
        parse(parser, words[words.index("foredraft") + 1 :])


def parse(parser: Any, words: list[str]) -> None:
    if hasattr(parser, "commands"):
        parse(parser.commands[words[0]], words[1:])
    else:
        parser.make_context(parser.name, list(words))


@pytest.mark.parametrize("start", [*NOT_RUN, *NOT_RUN_WORDS])
def test_every_command_exception_is_used(start: str) -> None:
    assert any(start in command for _, command in COMMANDS)


def test_make_targets_and_extras_exist() -> None:
    makefile, project = text_of("Makefile"), text_of("pyproject.toml")
    for _, command in COMMANDS:
        words = parts(command)[1]
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        for extra in re.findall(r"foredraft\[(\w+)\]", command):
            assert f"\n{extra} = [" in project


def leaves(parser: Any, name: str = "") -> dict[str, Any]:
    if not hasattr(parser, "commands"):
        return {name: parser}
    return {k: v for sub, one in parser.commands.items() for k, v in leaves(one, f"{name} {sub}".strip()).items()}


def test_the_reference_names_every_command() -> None:
    text = text_of("docs/reference/command-line.md")
    assert not [name for name in leaves(typer.main.get_command(app)) if f"`{name}`" not in text]


@cache
def our_options() -> set[str]:
    parsers = leaves(typer.main.get_command(app)).values()
    return {"--help"} | {
        text for one in parsers for param in one.params for text in (*param.opts, *param.secondary_opts)
    }


@cache
def benchmark_scripts() -> str:
    paths = [path for path in (ROOT / "benchmarks").rglob("*.py") if ".envs" not in path.parts]
    return "".join(path.read_text(encoding="utf-8") for path in paths)


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_exists(page: str) -> None:
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text_of(page)))
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert not [name for name in named - our_options() if f'"{name}"' not in benchmark_scripts()]


# data


@pytest.mark.parametrize("page", pages_with("toml"))
def test_settings_are_read(page: str, tmp_path: Path) -> None:
    for i, block in enumerate(blocks(page, "toml")):
        file = tmp_path / f"{i}.toml"
        file.write_text(block.code)
        assert Settings.read(file) != Settings()


@pytest.mark.parametrize("page", pages_with("json"))
def test_json_is_a_request_or_an_error(page: str) -> None:
    document = create_app(ServerSettings(), LLM).openapi()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    for block in blocks(page, "json"):
        data = json.loads(block.code)
        place = chat["responses"]["400"] if "error" in data else chat["requestBody"]
        schema = place["content"]["application/json"]["schema"]
        jsonschema.validate(data, {**document, **schema})
        known = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert data.keys() <= known.keys()


# pages


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_its_language(page: str) -> None:
    openings = re.findall(r"^ *```(.*)$", text_of(page), re.MULTILINE)[::2]
    assert set(openings) <= LANGUAGES


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_wrapped(page: str) -> None:
    """Table rows, images and program output may be longer."""
    text = re.sub(r"^```text\n.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "!["))]
    assert not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    missing = []
    for link, anchor in LINK.findall(text_of(page)):
        target = (ROOT / page).parent / link if link else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append((link, anchor))
    assert not missing


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link, _ in LINK.findall(text_of("docs/README.md"))}
    assert not [page for page in DOCS if (ROOT / page).resolve() not in {*linked, index}]


@pytest.mark.parametrize("page", PAGES)
def test_every_repository_file_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"(?<![\w./])(?:src|tests|docs|benchmarks)/[\w./-]*\w", text_of(page))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_exists(page: str) -> None:
    source = ROOT / "src" / "foredraft"
    folders = "|".join(path.name for path in source.iterdir() if path.is_dir() and path.name[0] != "_")
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text_of(page))
    assert not [name for name in named if not (source / name).exists()]
    files = {path.name for path in source.rglob("*.*")}
    assert not [name for name in re.findall(r"`(\w+\.(?:py|h|cpp))`", text_of(page)) if name not in files]


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md"])
def test_every_benchmark_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"python -m (benchmarks\.[\w.]*\w)", text_of(page))
    assert not [name for name in named if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]


def test_every_page_that_the_source_names_exists() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "deploy").iterdir()]
    named = {name for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


# the tutorial


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_tutorials_drafters_keep_the_contract(drafter: str, tutorial: dict[str, Any]) -> None:
    check_drafter(lambda vocab_size: DRAFTERS[drafter](tutorial, vocab_size), invisible=False)


@pytest.mark.slow
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
    if plain.target.traits.row_exact:  # otherwise only up to near ties
        assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_tutorials_sampling_drafter_has_accepted_tokens(tutorial: dict[str, Any]) -> None:
    llm = LLM(
        method=tutorial["FrequencyDrafter"](4096), speculative_tokens=4
    )  # "auto" may decide that drafting is not worth its time
    llm.generate(list(PROMPTS), SamplingParams(max_tokens=64, temperature=1.0))
    assert llm.engine.stats.num_accepted_tokens > 0
