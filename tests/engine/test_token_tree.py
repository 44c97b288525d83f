"""Tree shapes: paths, children, depths and cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import ForedraftError
from foredraft.engine.token_tree import ROOT, TreeShape, depths_of, path_to

PARENTS = st.integers(0, 12).flatmap(lambda size: st.tuples(*(st.integers(ROOT, node - 1) for node in range(size))))


def ranks_of(shape: TreeShape, node: int) -> tuple[int, ...]:
    """The path to a node, in the form that `of_paths` takes."""
    nodes = path_to(shape.parents, node)
    return tuple(shape.children[shape.parents[each]].index(each) for each in nodes)


@given(PARENTS)
def test_a_shape_can_be_rebuilt_from_its_paths(parents: tuple[int, ...]) -> None:
    """Up to the order of the nodes, which becomes level by level."""
    shape = TreeShape(parents)
    paths = [ranks_of(shape, node) for node in range(len(shape))]
    again = TreeShape.of_paths(paths)
    assert sorted(ranks_of(again, node) for node in range(len(again))) == sorted(paths)
    assert again.depths == sorted(again.depths)


@given(PARENTS)
def test_a_path_goes_from_the_root_to_its_node(parents: tuple[int, ...]) -> None:
    for node, depth in enumerate(depths_of(parents)):
        path = path_to(parents, node)
        assert path[-1] == node
        assert len(path) == depth
        assert [parents[each] for each in path] == [ROOT, *path[:-1]]
    assert path_to(parents, ROOT) == []


@given(PARENTS, st.integers(0, 12))
def test_a_cut_keeps_the_first_nodes(parents: tuple[int, ...], num_nodes: int) -> None:
    assert TreeShape(parents).cut(num_nodes).parents == parents[:num_nodes]


def test_of_paths_reads_medusas_form() -> None:
    shape = TreeShape.of_paths([[0], [0, 0], [1], [1, 0], [0, 1]])
    assert shape.parents == (ROOT, ROOT, 0, 0, 1)
    assert shape.children == {ROOT: [0, 1], 0: [2, 3], 1: [4]}
    assert shape.depth == 2


@given(PARENTS, st.lists(st.integers(0, 3), max_size=6))
def test_fans_count_the_children_of_the_nodes_on_a_path(parents: tuple[int, ...], ranks: list[int]) -> None:
    shape = TreeShape(parents)
    fans = shape.fans(ranks)
    known = {ranks_of(shape, node) for node in range(len(shape))}
    reached = [tuple(ranks[:depth]) for depth in range(len(ranks) + 1) if not depth or tuple(ranks[:depth]) in known]
    expected = [sum(len(path) == len(each) + 1 and path[:-1] == each for path in known) for each in reached]
    assert fans == expected[: expected.index(0) if 0 in expected else None]
    assert shape.first_branch == next(n for n in range(len(shape) + 1) if (0,) * (n + 1) not in known)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_chain_is_recognised(length: int) -> None:
    chain = TreeShape.chain(length)
    assert chain.is_chain
    assert chain.depth == length
    assert [path_to(chain.parents, node) for node in range(length)] == [path_to(None, node) for node in range(length)]


def test_a_shape_with_siblings_is_no_chain() -> None:
    assert not TreeShape((ROOT, ROOT)).is_chain


@pytest.mark.parametrize("paths", [[[0, 0]], [[1]], [[0], [0, 1]], [[0], []], [[0], [2]]])
def test_a_missing_prefix_or_sibling_is_named_in_the_error(paths: list[list[int]]) -> None:
    with pytest.raises(ForedraftError, match=r"a tree with the path .* must also have .* and "):
        TreeShape.of_paths(paths)


@pytest.mark.parametrize("parents", [(0,), (ROOT, 1), (-2,)])
def test_a_parent_must_be_an_earlier_node(parents: tuple[int, ...]) -> None:
    with pytest.raises(ForedraftError, match="must be an earlier node"):
        TreeShape(parents)
