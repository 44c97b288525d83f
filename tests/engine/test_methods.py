"""Methods by name and as objects, alone and combined, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.drafters import ScriptedDrafter
from foredraft.engine.methods import check_exit_layer, choose_methods, draft_of, name_of, names_of
from foredraft.errors import ForedraftError

SCRIPTED = ScriptedDrafter(lambda *_: [])


def test_without_a_method_the_draft_model_is_used_if_there_is_one() -> None:
    assert choose_methods(None, has_draft_model=True) == ["draft_model"]
    assert choose_methods(None, has_draft_model=False) == ["suffix"]
    assert choose_methods(None, has_draft_model=False, has_exit_layer=True) == ["early_exit"]
    assert choose_methods(None, has_draft_model=True, has_exit_layer=True) == ["draft_model"]


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ("ngram", ["ngram"]),
        ("ngram+suffix", ["ngram", "suffix"]),
        (["suffix", "ngram"], ["suffix", "ngram"]),
        (SCRIPTED, [SCRIPTED]),
        (["suffix", SCRIPTED], ["suffix", SCRIPTED]),
    ],
)
def test_methods_may_be_one_or_several(methods: Any, expected: list[Any]) -> None:
    assert choose_methods(methods, has_draft_model=False) == expected


@pytest.mark.parametrize(
    ("methods", "has_draft_model", "words"),
    [
        ("magic", False, "unknown method 'magic': known methods are "),
        ("eagle3", True, "unknown method 'eagle3': use \"eagle\""),
        ("deepseek_mtp", False, "unknown method 'deepseek_mtp': use \"mtp\""),
        ([], False, "at least one drafter"),
        ("ngram+ngram", False, "each only once"),
        ("none+ngram", False, '"none" cannot be combined'),
        ("draft_model", False, 'method "draft_model" needs a draft model: give its directory or hub id as draft_model'),
        ("suffix+draft_model", False, "needs a draft model"),
        ("early_exit", False, "needs a layer: give exit_layer"),
        ("self-int8", True, 'method "self-int8" makes its draft from the target: leave draft_model out'),
        (object(), False, "object"),
    ],
)
def test_methods_that_cannot_work_are_refused_in_one_line(methods: Any, has_draft_model: bool, words: str) -> None:
    with pytest.raises(ForedraftError, match=words) as caught:
        choose_methods(methods, has_draft_model=has_draft_model)
    assert "\n" not in str(caught.value)


def test_a_draft_model_may_be_combined_with_a_copy_of_the_target() -> None:
    methods = choose_methods("draft_model+self-int8", has_draft_model=True)
    assert [draft_of(method) for method in methods] == ["draft_model", "self-int8"]


@pytest.mark.parametrize(
    ("names", "draft_method", "words"),
    [
        (["suffix"], "draft_model", 'exit_layer is for the method "early_exit", but the method is "suffix"'),
        (["early_exit", "eagle"], "eagle", "exit_layer and a head cannot be combined"),
    ],
)
def test_an_exit_layer_that_no_method_uses_is_refused(names: list[str], draft_method: str, words: str) -> None:
    check_exit_layer(None, names, draft_method)
    check_exit_layer(2, ["early_exit", "draft_model"], "draft_model")
    with pytest.raises(ForedraftError, match=words):
        check_exit_layer(2, names, draft_method)


def test_drafter_objects_are_named_by_their_class() -> None:
    assert name_of(SCRIPTED) == "ScriptedDrafter"
    assert names_of(["ngram", SCRIPTED]) == ["ngram", "ScriptedDrafter"]
    assert names_of("ngram+suffix") == ["ngram", "suffix"]
    assert draft_of(SCRIPTED) == draft_of("ngram") == "draft_model"


@pytest.mark.parametrize(
    ("method", "fits"), [("eagle", True), ("suffix+eagle", True), ("medusa", False), ("suffix+dflash", False)]
)
def test_a_head_drafts_only_with_the_method_that_its_files_are_for(method: str, fits: bool) -> None:
    if fits:
        assert choose_methods(method, has_draft_model=True, draft_method="eagle")
        return
    with pytest.raises(ForedraftError, match='cannot draft with this head: use method "eagle"'):
        choose_methods(method, has_draft_model=True, draft_method="eagle")
