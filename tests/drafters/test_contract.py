"""Law 4: the contract between drafters and the engine, checked with the suite that users test their own drafters with. Registered
drafters are included automatically."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.drafters import REGISTRY, DrafterContext, build
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel
from foredraft.testing import DrafterContract, check_drafter

Make = Callable[[str], Drafter]


class TestContract(DrafterContract):
    invisible = False  # test_engine.py and test_llm.py check the texts of registered drafters

    @pytest.fixture(autouse=True)
    def _named(self, drafter_name: str, make_drafter: Make, vocab_size: int) -> None:
        self._make, self._name = make_drafter, drafter_name
        self.vocab_size = vocab_size
        self.remembers = "corpus" in drafter_name

    def make_drafter(self, vocab_size: int) -> Drafter:
        return self._make(self._name)


@pytest.mark.slow
def test_a_drafter_that_reads_with_a_model(draft: LanguageModel) -> None:
    def make(vocab_size: int) -> Drafter:
        return build("draft_model", DrafterContext(vocab_size, MemoryPool(1 << 30), draft))

    check_drafter(make, vocab_size=draft.traits.vocab_size, invisible=False)


def test_an_unknown_name_is_refused_with_the_known_ones(make_drafter: Make) -> None:
    with pytest.raises(ForedraftError, match=r"unknown drafter 'oracle'.*ngram.*suffix"):
        make_drafter("oracle")


def test_the_registry_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        REGISTRY["mine"] = REGISTRY["none"]  # type: ignore[index]


def test_build_makes_a_new_drafter_each_time(make_drafter: Make) -> None:
    assert make_drafter("ngram") is not make_drafter("ngram")
