"""Trees under construction: the common part of the drafters that choose siblings from a model's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from foredraft.drafters._drafts import Draft, fit_vocabulary
from foredraft.engine.proposal import CERTAIN, DraftRequest
from foredraft.engine.region import Regions
from foredraft.engine.token_tree import ROOT, TreeShape, path_to
from foredraft.kernels import DrawSpec
from foredraft.model import LanguageModel, Read
from foredraft.sampling import Row, draft_specs, select, top_choices


@dataclass(slots=True)
class DraftTree:
    """A draft tree under construction. ids: the tokens of the nodes that have grown, by node of the shape."""

    draft: Draft
    shape: TreeShape
    ids: dict[int, int] = field(default_factory=dict)

    @property
    def request(self) -> DraftRequest:
        return self.draft.request

    def growing(self, depth: int) -> list[int]:
        """The nodes at this depth (0: ROOT) that have grown and have children in the shape."""
        if depth == 0:
            return [ROOT] if ROOT in self.shape.children else []
        return [node for node in sorted(self.ids) if self.shape.depths[node] == depth and node in self.shape.children]

    def row(self, node: int) -> Row:
        """The row of logits after a node."""
        drafted = [self.ids[place] for place in path_to(self.shape.parents, node)]
        return Row(self.request.sampler, self.request.tokens, drafted, is_coupled=True)

    def grow(self, node: int, ids: Sequence[int]) -> None:
        """Add the children of a node, best first. If there are fewer than the shape has, the others do not grow."""
        self.ids.update(zip(self.shape.children[node], ids, strict=False))

    def inner(self, depth: int) -> list[int]:
        """The nodes down to this depth that have grown and have children in the shape, parents first."""
        return [node for node in sorted(self.ids) if self.shape.depths[node] <= depth and node in self.shape.children]

    def parents_among(self, nodes: Sequence[int]) -> list[int]:
        """For each of these nodes the index of its parent among them, or ROOT."""
        places = {node: place for place, node in enumerate(nodes)} | {ROOT: ROOT}
        return [places[self.shape.parents[node]] for node in nodes]

    def finish(self) -> None:
        """Copy the tokens to the draft."""
        nodes = sorted(self.ids)
        self.draft.ids, self.draft.parents = [self.ids[node] for node in nodes], self.parents_among(nodes)
        self.draft.prob_rows = [CERTAIN] * len(nodes)


def trees_for(drafts: Sequence[Draft]) -> list[DraftTree]:
    """The trees for the drafts that were requested as trees."""
    return [
        DraftTree(draft, draft.request.shape.cut(draft.max_len)) for draft in drafts if draft.request.shape is not None
    ]


def grow_all(
    trees: Sequence[DraftTree], logits: Tensor, vocab_size: int, read: Callable[[Sequence[DraftTree], int], Tensor]
) -> None:
    """Grow trees level by level. logits: [len(trees), V'], after each request's tokens. read: given the trees that continue at a depth,
    reads their inner nodes down to it (`read_of`) -> [R, V'], a row for each of growing_nodes at that depth."""
    for depth in count():
        grow(trees, depth, logits, vocab_size)
        going_on = [tree for tree in trees if tree.growing(depth + 1)]
        if not going_on:
            break
        logits = read(going_on, depth + 1)
    for tree in trees:
        tree.finish()


def split_trees(
    trees: Sequence[DraftTree], is_able: Callable[[Draft], bool]
) -> tuple[list[DraftTree], list[DraftTree]]:
    """-> the trees that a model can grow in one call, and the others. is_able: whether it can for a draft without a constraint. With one it
    cannot, since siblings are chosen among the tokens that it allows."""
    at_once, others = list[DraftTree](), list[DraftTree]()
    for tree in trees:
        can = tree.request.sampler.constraint is None and is_able(tree.draft)
        (at_once if can else others).append(tree)
    return at_once, others


def grow_at_once(
    trees: Sequence[DraftTree],
    passes: Callable[[Sequence[Draft]], Iterable[list[Draft]]],
    grow: Callable[[Sequence[Draft], Sequence[TreeShape], Sequence[DrawSpec]], list[list[int]]],
) -> None:
    """Grow all trees of a pass in one call. passes: groups drafts into passes. grow: lets a model read the unread rest of each draft and
    grow its tree -> the token of each node, -1 where none has grown"""
    if not trees:
        return
    by_draft = {id(tree.draft): tree for tree in trees}
    for drafts in passes([tree.draft for tree in trees]):
        group = [by_draft[id(draft)] for draft in drafts]
        specs = draft_specs([tree.row(ROOT) for tree in group], [tree.shape.depth for tree in group])
        grown = grow(drafts, [tree.shape for tree in group], specs)
        for tree, ids in zip(group, grown, strict=True):
            tree.ids = {node: token for node, token in enumerate(ids) if token >= 0}
            tree.finish()


def grow_over(
    model: LanguageModel, cache: Regions, trees: Sequence[DraftTree], logits: Tensor, vocab_size: int
) -> None:
    """Grow trees with a language model, one pass per level. Each pass reads the previous levels again, since rows cost little.

    cache: holds each request's tokens. logits: [len(trees), V'], after them
    """

    def read(going_on: Sequence[DraftTree], depth: int) -> Tensor:
        for tree in going_on:
            tokens = tree.request.tokens
            cache.region(tree.request.seq_id).keep_prefix_of(tokens, at_most=len(tokens))
        return select(model.read([read_of(tree, depth) for tree in going_on], cache), last_level(going_on, depth))

    grow_all(trees, logits, vocab_size, read)


def inner_nodes(trees: Sequence[DraftTree], depth: int) -> list[tuple[DraftTree, int]]:
    """The inner nodes down to this depth, tree by tree: the rows that `read_of` reads."""
    return [(tree, node) for tree in trees for node in tree.inner(depth)]


def last_level(trees: Sequence[DraftTree], depth: int) -> list[int]:
    """The indices among inner_nodes of the nodes at this depth."""
    return [row for row, (tree, node) in enumerate(inner_nodes(trees, depth)) if tree.shape.depths[node] == depth]


def read_of(tree: DraftTree, depth: int) -> Read:
    """A read of the tree's inner nodes down to this depth, after the tokens in the cache."""
    nodes = tree.inner(depth)
    return Read(tree.request.seq_id, [tree.ids[node] for node in nodes], len(nodes), tree.parents_among(nodes))


def growing_nodes(trees: Sequence[DraftTree], depth: int) -> Iterator[tuple[DraftTree, int]]:
    """The nodes at this depth that have children to grow, tree by tree."""
    return ((tree, node) for tree in trees for node in tree.growing(depth))


def grow(trees: Sequence[DraftTree], depth: int, logits: Tensor, vocab_size: int) -> None:
    """Grow one more level. logits: [R, V'], a row for each of growing_nodes(trees, depth), cut or padded to vocab_size."""
    places = list(growing_nodes(trees, depth))
    counts = [len(tree.shape.children[node]) for tree, node in places]
    rows = [tree.row(node) for tree, node in places]
    for (tree, node), ids in zip(places, top_choices(fit_vocabulary(logits, vocab_size), rows, counts), strict=True):
        tree.grow(node, ids)
