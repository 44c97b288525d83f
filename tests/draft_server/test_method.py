"""Which methods a draft server can run, and why it refuses others."""

from __future__ import annotations

import pytest
import torch

from foredraft.draft_server import DraftServer, DraftServerSettings, check_method, load_drafter
from foredraft.drafters import NgramDrafter, RemoteDrafter, SuffixDrafter
from foredraft.errors import DrafterError, ForedraftError
from foredraft.model import EMBEDDED, LoadOptions
from tests.heads.random_heads import HEAD_METHODS, embedded_head


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_methods_that_read_the_target_are_not_remote(method: str) -> None:
    with pytest.raises(ForedraftError, match=f"{method} drafts from what the target computed"):
        check_method(method, has_draft_model=True)


def test_a_head_is_recognised_by_its_files() -> None:
    settings = DraftServerSettings(str(embedded_head("eagle")), None, LoadOptions(device="cpu"))
    with pytest.raises(ForedraftError, match="eagle drafts from what the target computed"):
        load_drafter(settings)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("suffix+ngram", "one method"),
        ("self-int8", "--draft-model TARGET --quantization int8"),
        ("none", "drafts by itself"),
        ("remote", "drafts by itself"),
        ("draft_model", "needs a draft model"),
        ("oracle", "unknown method"),
    ],
)
def test_other_methods_are_refused_by_name(method: str, words: str) -> None:
    with pytest.raises(ForedraftError, match=words):
        check_method(method, has_draft_model=False)


def test_an_object_that_reads_the_target_is_refused() -> None:
    drafter = NgramDrafter()
    drafter.taps = (1,)  # type: ignore[attr-defined]
    with pytest.raises(DrafterError, match="NgramDrafter reads what the target computed"):
        DraftServer(drafter, None)  # type: ignore[arg-type]


def test_lookups_work_with_any_vocabulary_and_models_only_with_their_own() -> None:
    options = LoadOptions(device="cpu")
    drafter, vocabulary = load_drafter(DraftServerSettings(None, None, options))
    assert isinstance(drafter, SuffixDrafter)
    assert vocabulary is None
    assert not isinstance(drafter, RemoteDrafter)
    with pytest.raises(ForedraftError, match="suffix needs no draft model"):
        load_drafter(DraftServerSettings(str(EMBEDDED / "draft"), "suffix", options))
    drafter, vocabulary = load_drafter(DraftServerSettings(str(EMBEDDED / "draft"), None, options, 1 << 24))
    assert type(drafter).__name__ == "DraftModelDrafter"
    assert vocabulary is not None
    assert vocabulary.size == 4096
    assert len(vocabulary.digest) == 16
    assert torch.get_num_threads() >= 1
