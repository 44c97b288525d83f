"""DFlash heads against z-lab's and speculators' own, and what their files must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.engine.cache import KVCache, MemoryPool
from foredraft.errors import ModelError
from foredraft.heads import DFlashConfig, DFlashHead, head_method_of, load_head
from tests.heads.checkpoints import TARGET, Golden, golden

NAMES = ["dflash", "dflash_sliding", "speculators_dflash", "speculators_dflash_from_anchor"]


def head_of(case: Golden, folder: Path) -> DFlashHead:
    """Over the target's embeddings and lm_head, which are with the golden file."""
    embeddings, lm_head = (case.inputs.get(name, torch.empty(0)) for name in ("embeddings", "lm_head"))
    checkpoint = load_head(str(case.save(folder)), TARGET)
    return DFlashHead.of(checkpoint, lambda ids: embeddings[ids], lambda x: x @ lm_head.T)


def cache_for(head: DFlashHead, num_sequences: int = 1) -> KVCache:
    cache = KVCache(MemoryPool(1 << 24), head.bytes_per_token, 1024)
    assert all(cache.reserve(seq_id, 16) for seq_id in range(num_sequences))
    return cache


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pieces", [[7], [1, 4, 2]])
def test_logits_of_a_block_are_the_programs_own(name: str, pieces: list[int], tmp_path: Path) -> None:
    """However its context came in; and a second block over the same context is the first one again."""
    case, head = golden(name), head_of(golden(name), tmp_path)
    *tokens, pending = case.inputs["ids"].tolist()
    cache, start = cache_for(head), 0
    for length in pieces:
        rows = slice(start, start + length)
        head.inject(cache.region(0), tokens[rows], case.inputs["features"][rows])
        start += length
    for _ in range(2):
        logits = head.read([0], [pending], cache)[0]
        torch.testing.assert_close(logits, case.expected["logits"], atol=1e-4, rtol=0)
    assert cache.region(0).tokens == tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_gives_what_each_sequence_gives_alone(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(golden(name), tmp_path)
    *tokens, pending = case.inputs["ids"].tolist()
    cache = cache_for(head, 3)
    for seq_id, length in enumerate((7, 2, 5)):
        head.inject(cache.region(seq_id), tokens[:length], case.inputs["features"][:length])
    together = head.read([0, 1, 2], [pending, 3, 9], cache)
    alone = torch.cat([head.read([seq_id], [token], cache) for seq_id, token in enumerate((pending, 3, 9))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_descriptions_follow_the_files(tmp_path: Path) -> None:
    found = {name: load_head(str(golden(name).save(tmp_path / name)), TARGET) for name in NAMES}
    configs = {name: checkpoint.config for name, checkpoint in found.items()}
    assert all(isinstance(config, DFlashConfig) for config in configs.values())
    assert all(head_method_of(str(tmp_path / name)) == "dflash" for name in NAMES)
    # z-lab counts outputs of layers, speculators what layers read
    assert [configs[name].taps for name in NAMES] == [(1, 4)] * 4
    assert [configs[name].num_places for name in NAMES] == [3, 3, 3, 4]  # type: ignore[union-attr]
    assert configs["dflash_sliding"].is_causal == (True, False)  # type: ignore[union-attr]
    assert [found[name].form for name in NAMES[1:3]] == ["DFlash", "speculators, DFlash"]
    changed = golden("dflash_sliding").having({"is_causal": False}).save(tmp_path / "changed")
    assert load_head(str(changed), TARGET).config.is_causal == (False, False)  # type: ignore[union-attr]


ZLAB, SPECULATORS = golden("dflash"), golden("speculators_dflash")
INNER = ZLAB.config["dflash_config"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (ZLAB.having({"dflash_config": {**INNER, "target_layer_ids": None}}), "target_layer_ids must name the layers"),
        (ZLAB.having({"dflash_config": {**INNER, "target_layer_ids": [0, 8]}}), "the target has 8 layers"),
        (
            ZLAB.having({"dflash_config": {**INNER, "mask_token_id": 32}}),
            "mask token is 32, and there are embeddings of 32",
        ),
        (
            ZLAB.having({"dflash_config": {**INNER, "projector_type": "dspark"}}),
            "does not know: dflash_config.projector_type",
        ),
        (ZLAB.having({"dflash_config": {**INNER, "output_multiplier": 2.0}}), "output_multiplier is 2.0: only 1.0"),
        (ZLAB.having({"block_size": 1}), "block_size is 1: a block has at least 2 rows"),
        (ZLAB.without(["hidden_norm.weight"]), "tensors are missing: hidden_norm.weight"),
        (ZLAB.having(tensors={"candidate_selector.x": torch.zeros(1)}), "no use for: candidate_selector.x"),
        (SPECULATORS.having({"aux_hidden_state_layer_ids": None}), "aux_hidden_state_layer_ids must name the layers"),
        (SPECULATORS.having({"markov_rank": 4}), "does not know: markov_rank"),
        (SPECULATORS.without(["d2t", "t2d"]), "has no table d2t"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_do_not_fit_are_refused(case: Golden, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_head(str(case.save(tmp_path)), TARGET)
