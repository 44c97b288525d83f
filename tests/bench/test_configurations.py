"""The names of configurations, and the LLMs that they become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, ForedraftError
from foredraft.bench import Configuration
from foredraft.bench.configurations import contenders_for, default_configurations
from foredraft.drafters import REGISTRY, ScriptedDrafter
from foredraft.model import EMBEDDED

DRAFTING = st.builds(
    Configuration,
    st.sampled_from(sorted(REGISTRY.keys() - {"none"})),
    st.none() | st.integers(0, 32) | st.just("auto"),
    st.integers(1, 64),
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1)


@given(DRAFTING | st.builds(Configuration.plain, st.integers(1, 64)))
def test_names_can_be_parsed(configuration: Configuration) -> None:
    assert Configuration.parse(configuration.name) == configuration


def test_a_common_batch_size_is_the_default() -> None:
    assert Configuration.parse("suffix:4", 8) == Configuration("suffix", 4, 8)
    assert Configuration.parse("suffix:4@2", 8) == Configuration("suffix", 4, 2)
    assert Configuration.parse("plain", 8) == Configuration.plain(8)


@pytest.mark.parametrize("text", ["", ":4", "suffix:", "suffix:4@", "suffix@many", "@4", "plain:4"])
def test_invalid_configurations_are_refused(text: str) -> None:
    with pytest.raises(ForedraftError, match="configuration"):
        Configuration.parse(text)


def test_a_batch_size_is_at_least_1() -> None:
    with pytest.raises(ForedraftError, match="batch_size must be at least 1"):
        Configuration.parse("suffix:4@0")


def test_contenders_share_the_models_and_have_engines_and_numbers_of_their_own(llm: LLM) -> None:
    contenders = contenders_for(llm, [*default_configurations(), Configuration("suffix"), Configuration("ngram", 2)])
    own = f"{llm.method}:{llm.speculative_tokens}"
    assert [contender.name for contender in contenders] == ["plain", own, f"suffix:{llm.speculative_tokens}", "ngram:2"]
    assert all(contender.llm.target is llm.target and contender.llm.draft is llm.draft for contender in contenders)
    assert len({id(contender.llm.engine) for contender in contenders}) == 4


def test_a_drafter_may_be_an_object(llm: LLM) -> None:
    (contender,) = contenders_for(llm, [Configuration(ScriptedDrafter({}), 3)])
    assert contender.name == "ScriptedDrafter:3"


@pytest.mark.parametrize(
    ("configurations", "words"),
    [
        ([], "give at least one"),
        ([Configuration("oracle", 4)], "configuration oracle:4: unknown method"),
        ([Configuration("suffix", "many")], "configuration suffix:many: speculative_tokens"),
        ([Configuration.plain(), Configuration("suffix", 2), Configuration("suffix", 2)], "suffix:2 is given 2 times"),
    ],
)
def test_configurations_that_cannot_run_are_refused_by_name(
    llm: LLM, configurations: list[Configuration], words: str
) -> None:
    with pytest.raises(ForedraftError, match=words):
        contenders_for(llm, configurations)


def test_a_draft_model_that_was_not_loaded_is_refused() -> None:
    with pytest.raises(ForedraftError, match=r"configuration draft_model:4: .* needs a draft model"):
        contenders_for(LLM(EMBEDDED / "target"), [Configuration("draft_model", 4)])
