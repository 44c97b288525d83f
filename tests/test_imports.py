"""Imports follow the order of `LAYERS`, and are not circular inside a package. They are read from the source with `ast`, wherever in a
file they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "foredraft"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Lowest first. A module may import from the levels above its own in this list, never from its own level or from below; modules of one
# name may import each other, but not in a circle. A folder has one entry, or one for each of its modules.
# `__init__` is the package itself, as `import foredraft` gives it.
LAYERS = (
    {
        "errors",
        "utils.heap",
        "utils.host_copy",
        "utils.interrupts",
        "utils.lazy",
        "utils.machine",
        "utils.prefix",
        "utils.startup",
        "utils.tensors",
        "utils.units",
        "engine.fairness",
    },
    {
        "settings",
        "engine.memory_pool",
        "engine.token_tree",
        "model.checkpoint",
        "utils.folders",
        "utils.isolation",
        "utils.ray_cluster",
        "utils.unicode",
    },
    {"kernels", "engine.sources"},
    {"engine.region", "gpu"},
    {"sampling", "engine.cache", "vocabulary"},
    {"engine.proposal", "gpu.passes", "utils.arguments"},
    {"engine.stats", "engine.contract", "engine.checks"},
    {"engine.sequence"},
    {"verify", "engine.step", "engine.forced_prefix", "engine.logprobs"},
    {"model"},
    {"heads", "remote"},
    {"drafters", "policy", "engine.drafter_group"},
    {"engine.scheduler", "engine.faults", "engine.methods"},
    {"engine.engine", "engine.models", "engine.draft_sources", "engine.hybrids"},
    {"engine.build", "engine.embedded_models", "engine.run"},
    {"engine", "utils", "text", "tools"},
    {"text.token_kinds", "text.tokenizing", "text.outputs", "text.grammar"},
    {"text.byte_fallback", "text.chat_template"},
    {"text.detokenizer"},
    {"text.stop_strings", "text.token_offsets"},
    {"text.stream"},
    {"text.request"},
    {"text.frontend", "text.inputs"},
    {"llm"},
    {"hf", "aio", "certificate"},
    {"__init__"},
    {"bench", "export", "integrations", "tools.inspection", "tools.quality", "testing", "trace"},
    {"draft_server", "server", "tools.demo", "tune"},
    {"train"},
    {"cli"},
    {"__main__"},
)
BY_MODULE = {"engine", "text", "tools", "utils"}
"""Folders whose modules have entries of their own. The folder's own name is its `__init__`."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Libraries that a module must not import: the engine handles no text, the server no tensors.
FORBIDDEN = {"engine.engine": {"tokenizers", "transformers"}, "server": {"torch"}}

ROOT = {"__init__", "__main__", "aio", "errors", "hf", "llm", "settings"}
"""The public modules: the only ones at the package's root."""


def read_tree(source: Path) -> dict[str, ast.Module]:
    """Every module below `source`, by dotted name (`foredraft.drafters` is `drafters/__init__.py`)."""
    trees = {}
    for path in sorted(source.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(source).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        trees[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


def imported_names(importer: str, tree: ast.Module, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - is_package
                anchor = importer.split(".")
                base = ".".join([*anchor[: len(anchor) - up], *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def longest_module(name: str, modules: set[str]) -> str | None:
    """The module that contains a dotted name: `foredraft.errors.ModelError` is in `foredraft.errors`."""
    while name not in modules:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def unit(module: str) -> str:
    """The name of a module in `LAYERS`: the longest listed part of its dotted name below the package, else the first part."""
    parts = module.split(".")[1:]
    if not parts:
        return "__init__"
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    found = next((name for name in names if name in LEVEL), parts[0])
    return ".".join(parts[:2]) if found in BY_MODULE else found


def is_drafter(tree: ast.Module) -> bool:
    """Whether a file is a drafter rather than a helper: it has a class with a `propose` method."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(isinstance(item, ast.FunctionDef) and item.name == "propose" for node in classes for item in node.body)


def edge_problem(importer: str, imported: str, trees: dict[str, ast.Module]) -> str | None:
    """The problem with one import from within the package, or None."""
    low, high = unit(imported), unit(importer)
    if low not in LEVEL or high not in LEVEL:
        return None  # reported once, for the module
    if low != high:
        return None if LEVEL[low] < LEVEL[high] else f"`{high}` is not above `{low}` in LAYERS"
    if low == "drafters" and importer != f"{PACKAGE}.drafters":
        if imported == f"{PACKAGE}.drafters":
            return "a drafter does not import the registry"
        if imported != importer and is_drafter(trees[imported]):
            return "drafters do not import each other"
    return None


def violations(source: Path) -> list[str]:
    """Everything in a source tree that violates the order, one line each."""
    trees = read_tree(source)
    packages = {name for name in trees if (source / Path(*name.split(".")[1:]) / "__init__.py").exists()}
    unknown = sorted({unit(name) for name in trees} - LEVEL.keys())
    found = [f"{PACKAGE}.{name} has no place yet: add it to LAYERS in {Path(__file__).name}" for name in unknown]
    edges: dict[str, set[str]] = {name: set() for name in trees}
    for importer, tree in trees.items():
        for line, name in imported_names(importer, tree, is_package=importer in packages):
            imported = longest_module(name, set(trees))
            if name.split(".")[0] in FORBIDDEN.get(unit(importer), ()):
                problem: str | None = f"`{unit(importer)}` must not know {name.split('.')[0]}"
            else:
                problem = imported and edge_problem(importer, imported, trees)
            if problem:
                found.append(f"{importer}, line {line}, imports {name}: {problem}")
            elif imported and imported != importer:
                edges[importer].add(imported)
    return found + circles(edges)


def circles(edges: dict[str, set[str]]) -> list[str]:
    """The first circle of imports inside a package, if there is one."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [f"modules import each other in a circle: {' < '.join(error.args[1])}"]
    return []


def test_imports_go_one_way() -> None:
    found = violations(SOURCE)
    assert not found, "\n".join(found)


def test_the_source_is_found() -> None:
    assert {"foredraft", "foredraft.engine.engine", "foredraft.drafters"} <= read_tree(SOURCE).keys()


def test_only_public_modules_are_at_the_root() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == ROOT


def test_the_order_names_each_module_once() -> None:
    assert len(LEVEL) == sum(map(len, LAYERS))


DRAFTER = "class D:\n    def propose(self, requests): ...\n"
SOUND = {
    "__init__.py": "from foredraft.llm import LLM",
    "errors.py": "",
    "sampling/__init__.py": "from foredraft.sampling.token_probs import TokenProbs",
    "sampling/token_probs.py": "import torch",
    "engine/__init__.py": "",
    "engine/proposal.py": "from foredraft.sampling import TokenProbs",
    "engine/sequence.py": "from foredraft import errors\nfrom . import proposal",
    "engine/cache.py": "",
    "drafters/__init__.py": "from foredraft.drafters.one import D\nfrom .two import D",
    "drafters/one.py": f"from foredraft.drafters import _shared\n{DRAFTER}",
    "drafters/two.py": f"from ._shared import x\nfrom ..engine.proposal import Proposal\n{DRAFTER}",
    "drafters/_shared.py": "import foredraft.engine.cache",
    "engine/engine.py": "import torch\nfrom foredraft.drafters import D",
    "text/stream.py": "import tokenizers",
    "llm.py": "import transformers\nfrom foredraft.engine.engine import Engine",
    "server/__init__.py": "from foredraft import LLM",
    "cli/__init__.py": "import foredraft.server",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root / PACKAGE


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "engine/cache.py",
            "from foredraft.engine.engine import Engine",
            "`engine.cache` is not above `engine.engine`",
        ),
        ("engine/cache.py", "import foredraft.engine.engine as e", "`engine.cache` is not above `engine.engine`"),
        ("engine/cache.py", "from foredraft.engine import engine", "`engine.cache` is not above `engine.engine`"),
        ("engine/cache.py", "from .engine import Engine", "`engine.cache` is not above `engine.engine`"),
        ("engine/cache.py", "def late():\n    from . import engine", "`engine.cache` is not above `engine.engine`"),
        (
            "engine/cache.py",
            "if TYPE_CHECKING:\n    from .engine import Engine",
            "`engine.cache` is not above `engine.engine`",
        ),
        ("engine/cache.py", "from foredraft import LLM", "`engine.cache` is not above `__init__`"),
        (
            "sampling/token_probs.py",
            "from ..engine.proposal import Proposal",
            "`sampling` is not above `engine.proposal`",
        ),
        ("sampling/__init__.py", "from ..engine.proposal import P", "`sampling` is not above `engine.proposal`"),
        ("sampling/token_probs.py", "import foredraft.engine.cache", "`sampling` is not above `engine.cache`"),
        ("drafters/one.py", f"from foredraft.drafters.two import D\n{DRAFTER}", "drafters do not import each other"),
        ("drafters/one.py", f"from . import two\n{DRAFTER}", "drafters do not import each other"),
        ("drafters/one.py", f"from foredraft.drafters import D\n{DRAFTER}", "a drafter does not import the registry"),
        ("drafters/one.py", "from foredraft.engine.engine import Engine", "`drafters` is not above `engine.engine`"),
        ("engine/engine.py", "from foredraft.text.stream import decode", "`engine.engine` is not above `text.stream`"),
        ("engine/engine.py", "import tokenizers", "`engine.engine` must not know tokenizers"),
        ("server/routes.py", "from torch.nn import functional", "`server` must not know torch"),
        ("novelty.py", "", "foredraft.novelty has no place yet"),
        ("engine/novelty.py", "", "foredraft.engine.novelty has no place yet"),
        ("sampling/token_probs.py", "from foredraft.sampling import TOKEN_PROBS", "in a circle"),
        ("sampling/token_probs.py", "if TYPE_CHECKING:\n    import foredraft.sampling", "in a circle"),
    ],
)
def test_a_planted_fault_is_caught(tmp_path: Path, file: str, text: str, expected: str) -> None:
    found = violations(plant(tmp_path, SOUND | {file: text}))
    assert len(found) == 1
    assert expected in found[0]
