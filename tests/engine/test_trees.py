"""Law 2 with trees: greedy and seeded text is plain decoding's, whatever trees are drafted and however they are batched. Tree drafts
are also counted, pruned and refused correctly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import LLM, ForedraftError, SamplingParams
from foredraft.drafters import MergedDrafter, SuffixDrafter
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.token_tree import ROOT, TreeShape, depths_of, path_to
from foredraft.errors import DrafterError
from foredraft.model import LanguageModel
from foredraft.policy import Controller, DraftBudget, FixedPolicy
from foredraft.sampling import StructuredOutputs
from tests.conftest import MakeEngine
from tests.heads.fitted_heads import fitted_settings
from tests.heads.random_heads import head_settings

PROMPTS = ([0, 549, 300, 11, 12, 300, 11, 12], [0, 616, 635, 271, 480], [0, *range(500, 540)], [0, 9])
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.5, "seed": 4, "top_k": 50, "presence_penalty": 0.5, "frequency_penalty": 0.3},
)
WIDE = TreeShape.of_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])


class BranchingDrafter:
    """Drafts random trees, most of which contain a piece of the right text. texts: by prompt."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], vocab_size: int) -> None:
        self._texts, self._vocab_size, self._random = texts, vocab_size, Random(0)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        trees = [self._tree(request) for request in requests]
        return Proposal.certain([ids for ids, _ in trees], [parents for _, parents in trees])

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""

    def _tree(self, request: DraftRequest) -> tuple[list[int], list[int] | None]:
        length = self._random.randint(0, request.max_len)
        if self._random.random() < 0.2:
            return [self._random.randrange(self._vocab_size) for _ in range(length)], None
        text = next(
            (text for prompt, text in self._texts.items() if tuple(request.tokens[: len(prompt)]) == prompt), []
        )
        ids: list[int] = []
        parents: list[int] = []
        for node in range(length):
            parent = self._random.randint(ROOT, node - 1) if self._random.random() < 0.5 else node - 1
            siblings = {ids[i] for i in range(node) if parents[i] == parent}
            place = len(request.tokens) + (0 if parent == ROOT else depths_of(parents)[parent])
            right = text[place] if place < len(text) and self._random.random() < 0.8 else None
            token = right if right not in siblings and right is not None else self._other_than(siblings)
            ids.append(token)
            parents.append(parent)
        return ids, parents

    def _other_than(self, siblings: set[int]) -> int:
        return next(iter({self._random.randrange(self._vocab_size) for _ in range(10)} - siblings))


def params(max_tokens: int = 32, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings).resolve({})


def texts_of(engine: Any, wanted: Sequence[SamplingParams], preempted: int | None = None) -> list[list[int]]:
    return run([engine.add(prompt, each) for each in wanted for prompt in PROMPTS], engine, preempted)


def run(sequences: Sequence[TokenSequence], engine: Any, preempted: int | None = None) -> list[list[int]]:
    """Run the engine to its end. preempted: the step before which the first unfinished sequence is preempted. -> the texts"""
    step = 0
    while engine.has_work:
        if step == preempted:
            engine.preempt(next(sequence for sequence in sequences if not sequence.is_finished))
        engine.step()
        step += 1
    assert not any(sequence.error for sequence in sequences)
    assert engine.pool.used == engine.pool.bytes_retained
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [9, 512])
def test_random_trees_are_invisible(
    make_engine: MakeEngine, target: LanguageModel, int8_target: LanguageModel, precision: str, rows: int
) -> None:
    """Chains and trees in one batch, with one text preempted and chunked prefill."""
    model = target if precision == "bfloat16" else int8_target
    wanted = [params(**kind) for kind in KINDS]
    plain = texts_of(make_engine("none", model=model), wanted)
    known = {tuple(prompt): [*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=False)}
    drafter = BranchingDrafter(known, model.traits.vocab_size)
    engine = make_engine(drafter, model=model, speculative_tokens=8, limits=Limits(max_batch_tokens=rows))
    assert texts_of(engine, wanted, preempted=5) == plain
    stats = engine.stats
    assert stats.num_accepted_tokens > 20
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert stats.num_evaluated_tokens == sum(stats.evaluated_per_position)
    assert sum(stats.drafted_per_position) < stats.num_draft_tokens


METHODS = ("draft_model", "eagle", "medusa", "pard", "peagle", "dflash", "mtp", "early_exit", "ngram", "suffix")


def _methods_and_kinds() -> Iterator[Any]:
    """Every pair; the quick ones are each method with one of the first two kinds."""
    for i, method in enumerate(METHODS):
        for j, kind in enumerate(KINDS):
            yield pytest.param(method, kind, marks=[] if j == i % 2 else pytest.mark.slow, id=f"{method}-{kind}")


@pytest.mark.parametrize(("method", "kind"), [*_methods_and_kinds()])
def test_trees_of_every_method_are_invisible(method: str, kind: dict[str, Any]) -> None:
    """Alone, and in a batch with requests for chains and for fewer draft tokens."""
    settings: dict[str, Any] = fitted_settings(method) if method in {"eagle", "medusa", "mtp"} else {}
    settings |= head_settings(method) if method in {"pard", "peagle", "dflash"} else {}
    settings |= {"exit_layer": 6} if method == "early_exit" else {}
    llm = LLM(method=method, speculative_token_tree=_paths(WIDE), num_threads=1, **settings)
    plain = llm.with_drafter("none")
    prompts = ["def read_lines(path):", "Once upon a time there was a", "import os\nimport sys\n"]
    wanted = SamplingParams(max_tokens=40, logprobs=2, **kind)
    expected = [output.outputs[0] for output in plain.generate(prompts, wanted)]
    for speculative_tokens in (None, 4, "auto"):
        each = [
            SamplingParams(max_tokens=40, logprobs=2, speculative_tokens=speculative_tokens, **kind),
            wanted,
            wanted,
        ]
        found = [output.outputs[0] for output in llm.generate(prompts, each)]
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [_rounded(one.logprobs) for one in found] == [_rounded(one.logprobs) for one in expected]
    stats = llm.engine.stats
    drafted_by_depth = sum(stats.drafted_per_position)
    assert stats.num_draft_tokens >= drafted_by_depth > 0
    # a short sampled text has too few repeats for "ngram" to draft siblings; tests/drafters/test_ngram.py tests them
    assert stats.num_draft_tokens > drafted_by_depth or method == "ngram"
    for each in (llm, plain):
        each.engine.drop_retained()
    assert llm.engine.pool.used == 0


class AnyShape(FixedPolicy):
    """A random chain or tree for each text in each step, as "auto" may choose."""

    def __init__(self, drafters: Sequence[str]) -> None:
        super().__init__(drafters[0])
        self._drafters, self._random, self.num_trees = drafters, Random(5), 0

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        num_nodes = self._random.randint(0, max(0, min(6, sequence.room - 1)))
        shape = TreeShape(tuple(self._random.randint(ROOT, node - 1) for node in range(num_nodes)))
        is_tree = num_nodes > 0 and self._random.random() < 0.7
        self.num_trees += is_tree
        return DraftBudget(self._random.choice(self._drafters), num_nodes, shape if is_tree else None)


def test_a_shape_that_changes_every_step_is_invisible() -> None:
    wanted = [params(**kind) for kind in KINDS]
    llm = LLM(method="draft_model+suffix", num_threads=1)
    plain = texts_of(llm.with_drafter("none").engine, wanted)
    policy = AnyShape(list(llm.drafters))
    engine = llm._builder.engine(llm.drafters, llm.engine.pool, policy)
    assert texts_of(engine, wanted) == plain
    assert policy.num_trees > 50
    assert engine.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("num_running", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    "method",
    [
        "suffix+draft_model",
        "suffix+medusa",
        pytest.param("suffix+eagle", marks=pytest.mark.slow),
        pytest.param("ngram+early_exit", marks=pytest.mark.slow),
        pytest.param("ngram+suffix+draft_model", marks=pytest.mark.slow),
    ],
)
def test_merged_trees_are_invisible(method: str, num_running: int) -> None:
    """In batches with chains and trees, of the merged drafter and of single drafters."""
    (growing,) = {"draft_model", "eagle", "medusa", "early_exit"} & set(method.split("+"))
    settings = fitted_settings(growing) if growing != "draft_model" else {}
    llm = LLM(method=method, speculative_token_tree=_paths(WIDE), num_threads=1, max_num_seqs=num_running, **settings)
    wanted = [params(**kind) for kind in KINDS]
    plain = texts_of(llm.with_drafter("none").engine, wanted)
    assert texts_of(llm.engine, wanted, preempted=5) == plain, "in a fixed shape"
    assert {name for name, times in _num_asked(llm, wanted).items() if times} == {"merged"}
    policy = AnyShape(list(llm.drafters))
    engine = llm._builder.engine(llm.drafters, llm.engine.pool, policy)
    assert texts_of(engine, wanted) == plain
    assert policy.num_trees > 50
    assert min(engine.stats.num_accepted_tokens, llm.engine.stats.num_accepted_tokens) > 20


def _num_asked(llm: LLM, wanted: Sequence[SamplingParams]) -> Counter[str]:
    asked = Counter[str]()
    llm.engine.observers.append(SimpleNamespace(observe=lambda step: asked.update(step.draft_times)))
    texts_of(llm.engine, wanted)
    return asked


def test_trees_are_merged_where_several_methods_draft_trees_and_no_lookup_comes_first() -> None:
    llm = LLM(method="suffix+draft_model", num_threads=1)
    assert [*llm.drafters] == ["suffix", "draft_model", "hybrid"], "chains only"
    assert [*llm.with_drafter(speculative_tokens=3).drafters] == ["suffix", "draft_model"]
    assert [*llm.with_drafter(speculative_token_tree="auto").drafters] == ["suffix", "draft_model", "hybrid"]
    lookups = llm.with_drafter("ngram+suffix", speculative_token_tree="auto")
    assert [*lookups.drafters] == ["ngram", "suffix", "merged"]
    fixed = llm.with_drafter(speculative_token_tree=_paths(WIDE))
    assert [*fixed.drafters] == ["merged", "suffix", "draft_model"]
    assert fixed.method == "suffix+draft_model"
    assert [*llm.with_drafter("suffix", speculative_token_tree="auto").drafters] == ["suffix"]


def test_a_failing_part_of_a_merged_drafter_ends_no_request(make_engine: MakeEngine, recwarn: Any) -> None:
    class Failing(BranchingDrafter):
        grows_trees = True

        def propose(self, requests: list[DraftRequest]) -> Proposal:
            raise RuntimeError("broken")

    wanted = [params(**kind) for kind in KINDS]
    drafter = MergedDrafter({"suffix": SuffixDrafter(), "failing": Failing({}, 4096)})
    engine = make_engine(drafter, speculative_tokens=8)
    assert texts_of(engine, wanted) == texts_of(make_engine("none"), wanted)
    assert engine._policy.fallbacks["MergedDrafter", "failed"] > 0


def test_auto_drafts_trees_only_if_allowed() -> None:
    """The costs here favour trees: rows are free and depth is expensive."""
    shapes: dict[str, list[TreeShape | None]] = {}
    for tree in ("auto", "none"):
        llm = LLM(method="draft_model", speculative_token_tree=tree, num_threads=1)
        controller = llm.policy
        assert isinstance(controller, Controller)
        for num_rows in 3 * list(range(2, 10)):
            controller.costs.record_step(1, num_rows, 1e-4, sampled=False)
        for _ in range(3):
            controller.costs.record_draft("draft_model", 1, 1, 0, 0.0, sampled=False)
            controller.costs.record_draft("draft_model", 1, 2, 0, 8.0, sampled=False)
        seen = shapes.setdefault(tree, [])
        llm.engine.observers.append(
            SimpleNamespace(observe=lambda step, seen=seen: seen.append(step.scheduled[0].shape))
        )
        llm.generate("Once upon a time there was a", SamplingParams(max_tokens=24, temperature=0.0))
    assert any(shapes["auto"])
    assert not any(shapes["none"])


def _paths(shape: TreeShape) -> list[list[int]]:
    ranks = {node: shape.children[parent].index(node) for node, parent in enumerate(shape.parents)}
    return [[ranks[each] for each in path_to(shape.parents, node)] for node in range(len(shape))]


def _rounded(logprobs: Any) -> list[dict[int, float]]:
    return [{token: round(one.logprob, 6) for token, one in each.items()} for each in logprobs]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], {"temperature": 1.0}], ids=str)
def test_trees_under_a_grammar_are_invisible(kind: dict[str, Any]) -> None:
    llm = LLM(speculative_token_tree=_paths(WIDE), num_threads=1)
    form = StructuredOutputs(regex=r"(name of the [a-z ]{3,8}: the cat of the day is [a-z ]{3,10}; ){2}")
    wanted = SamplingParams(max_tokens=80, structured_outputs=form, frequency_penalty=-0.5, **kind)
    (found,) = llm.generate("Once upon a time", wanted)
    if kind.get("temperature") == 0.0 or "seed" in kind:
        (plain,) = llm.with_drafter("none").generate("Once upon a time", wanted)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.engine.stats.num_draft_tokens > 0


class Fixed:
    def __init__(self, make: Callable[[DraftRequest], Proposal]) -> None:
        self._make = make

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return self._make(requests[0])

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


@pytest.mark.parametrize(
    ("ids", "parents", "words"),
    [
        ([5, 6], [-1, 1], "must be an earlier token"),
        ([5, 6], [-2, 0], "must be an earlier token"),
        ([5, 5], [-1, -1], "siblings must differ"),
    ],
)
def test_a_broken_tree_is_refused(
    make_engine: MakeEngine, ids: list[int], parents: list[int], words: str, recwarn: Any
) -> None:
    from foredraft.engine.contract import check_proposal

    engine = make_engine(Fixed(lambda request: Proposal.certain([ids], [parents])), speculative_tokens=2)
    request = DraftRequest(0, [1, 2], 2, None)  # type: ignore[arg-type]
    with pytest.raises(DrafterError, match=words):
        check_proposal(object(), Proposal.certain([ids], [parents]), [request], 4096)
    sequence = engine.add(PROMPTS[0], params(8, temperature=0.0))
    while engine.has_work:
        engine.step()
    assert sequence.error is None
    assert engine.stats.num_draft_tokens == 0


def test_parents_must_fit_the_ids() -> None:
    with pytest.raises(ValueError, match="a parent for each"):
        Proposal.certain([[1, 2]], [[-1]])


def test_bad_tree_options_are_refused() -> None:
    for paths in ([], "[[0]]", "wide", [[]], [0], [[-1]], [[True]], [["0"]]):
        with pytest.raises(ForedraftError, match='speculative_token_tree must be "auto", "none" or a list'):
            LLM(speculative_token_tree=paths)  # type: ignore[arg-type]
    with pytest.raises(ForedraftError, match=r"a tree with the path \(1, 0\) must also have \(1,\)"):
        LLM(speculative_token_tree=[[0], [1, 0]])
    with pytest.raises(ForedraftError, match='speculative_tokens cannot be "auto"'):
        LLM(speculative_token_tree=[[0], [1]], speculative_tokens="auto")
