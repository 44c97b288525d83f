"""Block drafters compared with z-lab's, speculators' and DeepSpec's own programs, and what their files must contain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.errors import ModelError
from foredraft.heads import DFlashConfig, DFlashHead, HeadCheckpoint, head_method_of, load_head
from foredraft.heads.config import Convolution, Markov, Refiner, Selector
from foredraft.kernels import WeightFormat, dequantized, load_kernels, quantize_int8, unquantized
from tests.heads.checkpoints import TARGET, Golden, golden

PLAIN = [
    "dflash",
    "dflash_sliding",
    "speculators_dflash",
    "speculators_dflash_from_anchor",
    "speculators_dflash_sliding",
]
CORRECTED = [
    "speculators_dflash2",
    "speculators_dspark",
    "speculators_dspark_gated",
    "speculators_dspark_rnn",
    "speculators_xpress",
    "speculators_xpress_from_anchor",
    "deepspec_dspark",
    "deepspec_dspark_rnn",
]
NAMES = [*PLAIN, "dflash2", *CORRECTED]


def head_of(case: Golden, folder: Path) -> DFlashHead:
    """A head that uses the target's embeddings and lm_head, which are in the golden file."""
    embeddings, lm_head = (case.inputs.get(name, torch.empty(0)) for name in ("embeddings", "lm_head"))
    checkpoint = load_head(str(case.save(folder)), TARGET)
    return DFlashHead.of(checkpoint, lambda ids: embeddings[ids], lambda x: x @ lm_head.T)


def cache_for(head: DFlashHead, num_sequences: int = 1) -> KVCache:
    cache = KVCache(MemoryPool(1 << 24), head.bytes_per_token, 1024)
    assert all(cache.reserve(seq_id, 16) for seq_id in range(num_sequences))
    return cache


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pieces", [[7], [1, 4, 2]])
def test_logits_of_a_block_are_those_of_the_original_program(name: str, pieces: list[int], tmp_path: Path) -> None:
    """However its context was read. A second block over the same context equals the first."""
    case, head = golden(name), head_of(golden(name), tmp_path)
    *tokens, pending = case.inputs["ids"].tolist()
    cache, start = cache_for(head), 0
    for length in pieces:
        rows = slice(start, start + length)
        head.inject(cache.region(0), tokens[rows], case.inputs["features"][rows])
        start += length
    for _ in range(2):
        logits = head.read([0], [pending], cache).logits[0]
        torch.testing.assert_close(logits, case.expected["logits"], atol=1e-4, rtol=0)
    assert cache.region(0).tokens == tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_gives_what_each_sequence_gives_alone(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(golden(name), tmp_path)
    *tokens, pending = case.inputs["ids"].tolist()
    cache = cache_for(head, 3)
    for seq_id, length in enumerate((7, 2, 5)):
        head.inject(cache.region(seq_id), tokens[:length], case.inputs["features"][:length])
    together = head.read([0, 1, 2], [pending, 3, 9], cache).logits
    alone = torch.cat([head.read([seq_id], [token], cache).logits for seq_id, token in enumerate((pending, 3, 9))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def walked(head: DFlashHead, case: Golden, following: list[int] | None) -> tuple[torch.Tensor, list[int]]:
    """The logits of each row of the block, given the tokens before it, and the best token of each. following: how the text continues;
    None: with the best token of each row."""
    *tokens, pending = case.inputs["ids"].tolist()
    cache = cache_for(head)
    head.inject(cache.region(0), tokens, case.inputs["features"])
    correction, config = head.correction, head.config
    assert correction is not None
    block = correction.prepare(head.read([0], [pending], cache))
    previous = [tokens[-1] if correction.begins_earlier else pending] * config.first_row + [pending]
    memory, logits, drafted = correction.empty_memory(1), [], list[int]()
    with torch.inference_mode():
        for row in range(config.block_size):
            found, memory = correction(block, torch.tensor([row]), torch.tensor(previous[row : row + 1]), memory)
            logits.append(found)
            drafted += [int(head.on_target(found).argmax())] * (row >= config.first_row)
            previous = [*previous[: config.first_row + 1], *(drafted if following is None else following)]
    return torch.cat(logits), drafted


@pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("weight_format", [unquantized, quantize_int8])
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_head_computes_what_the_module_does_with_the_same_weights(
    name: str, weight_format: WeightFormat, tmp_path: Path
) -> None:
    kernels = load_kernels()
    assert kernels is not None
    case, packed, module = golden(name), head_of(golden(name), tmp_path), head_of(golden(name), tmp_path)
    packed.compile_chains(kernels)
    packed.pack(kernels, weight_format)
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = dequantized(weight_format(part.weight.bfloat16())).float()
    *tokens, pending = case.inputs["ids"].tolist()
    logits = []
    for head in (packed, module):
        cache = cache_for(head)
        head.inject(cache.region(0), tokens, case.inputs["features"])
        logits.append(head.read([0], [pending], cache).logits[0])
    pairs = [logits]
    if name in CORRECTED and not isinstance(packed.config.correction, Selector):  # whose choice of tokens may change
        pairs.append([walked(head, case, case.inputs["following"].tolist())[0] for head in (packed, module)])
    for got, expected in pairs:
        assert got.dtype == torch.float32
        error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < (0.04 if weight_format is unquantized else 0.1)


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_logits_are_those_of_the_original_program(name: str, tmp_path: Path) -> None:
    """For the same given tokens."""
    case, head = golden(name), head_of(golden(name), tmp_path)
    logits, _ = walked(head, case, case.inputs["following"].tolist())
    rows = slice(head.config.first_row, None)  # logits of other rows are not used
    torch.testing.assert_close(logits[rows], case.expected["corrected"][rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["dflash2", "deepspec_dspark", "deepspec_dspark_rnn"])
def test_the_best_path_is_that_of_the_original_program(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(golden(name), tmp_path)
    _, drafted = walked(head, case, None)
    assert drafted == case.expected["drafted"].tolist()


def test_configurations_follow_the_files(tmp_path: Path) -> None:
    found = {name: load_head(str(golden(name).save(tmp_path / name)), TARGET) for name in NAMES}
    configs = {name: config_of(checkpoint) for name, checkpoint in found.items()}
    assert all(head_method_of(str(tmp_path / name)) == "dflash" for name in NAMES)
    # z-lab numbers the outputs of layers, speculators their inputs
    assert {config.taps for config in configs.values()} == {(1, 4)}
    from_anchor = {name for name, config in configs.items() if config.num_places == 4}
    assert from_anchor == {
        "speculators_dflash_from_anchor",
        "speculators_dspark",
        "speculators_xpress_from_anchor",
        "deepspec_dspark",
        "deepspec_dspark_rnn",
    }
    assert configs["dflash_sliding"].is_causal == configs["speculators_dflash_sliding"].is_causal == (True, False)
    assert configs["speculators_dflash2"].is_causal == (False, False)
    assert [found[name].form for name in PLAIN[1:3]] == ["DFlash", "speculators' DFlash"]
    changed = golden("dflash_sliding").having({"is_causal": False}).save(tmp_path / "changed")
    assert config_of(load_head(str(changed), TARGET)).is_causal == (False, False)


def config_of(checkpoint: HeadCheckpoint) -> DFlashConfig:
    assert isinstance(checkpoint.config, DFlashConfig)
    return checkpoint.config


def test_each_kind_has_its_correction(tmp_path: Path) -> None:
    found = {name: config_of(load_head(str(golden(name).save(tmp_path / name)), TARGET)) for name in NAMES}
    assert (found["dflash"].kind, found["dflash"].correction) == ("dflash", None)
    assert (found["dflash2"].kind, found["dflash2"].correction) == ("dflash2", Selector(6, 5))
    assert found["dflash2"].convolution == Convolution(3, 4)
    assert found["speculators_dspark"].correction == Markov(6, "vanilla")
    assert found["deepspec_dspark_rnn"].correction == Markov(6, "rnn")
    assert found["speculators_xpress"].correction == Refiner(6, 12)


def test_a_head_without_its_correction_is_dflash(tmp_path: Path) -> None:
    case = golden("deepspec_dspark").having({"markov_rank": 0})
    names = [name for name in case.tensors if name.startswith("markov_head.")]
    assert config_of(load_head(str(case.without(names).save(tmp_path)), TARGET)).correction is None


def test_z_labs_selector_tables_may_have_names_that_end_in_weight(tmp_path: Path) -> None:
    case = golden("dflash2")
    assert "candidate_selector.successor_codebook.weight" in case.tensors
    other = case.renamed(
        **{
            f"candidate_selector.{name}.weight": f"candidate_selector.{name}"
            for name in ("predecessor_codebook", "successor_codebook")
        }
    )
    assert (
        load_head(str(other.save(tmp_path)), TARGET).tensors.keys()
        == load_head(str(case.save(tmp_path)), TARGET).tensors.keys()
    )


def test_specforges_dspark_follows_z_labs_form(tmp_path: Path) -> None:
    """Its projector is named in dflash_config, and its first token is the one after the anchor."""
    deep = golden("deepspec_dspark")
    moved = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    inner = {key: deep.config[key] for key in moved} | {"projector_type": "dspark", "attention_mode": "gqa"}
    case = deep.having({**dict.fromkeys(moved), "architectures": ["DSparkDraftModel"], "dflash_config": inner})
    checkpoint = load_head(str(case.save(tmp_path)), TARGET)
    assert (checkpoint.config.kind, config_of(checkpoint).num_places) == ("dspark", 4)
    assert "confidence head is not used" in checkpoint.notes[0]


ZLAB, SPECULATORS = golden("dflash"), golden("speculators_dflash")
DSPARK, SELECTING = golden("speculators_dspark"), golden("speculators_dflash2")
INNER = ZLAB.config["dflash_config"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (ZLAB.having({"dflash_config": {**INNER, "target_layer_ids": None}}), "target_layer_ids must list the layers"),
        (ZLAB.having({"dflash_config": {**INNER, "target_layer_ids": [0, 8]}}), "the target has 8 layers"),
        (
            ZLAB.having({"dflash_config": {**INNER, "mask_token_id": 32}}),
            "mask token is 32, but there are embeddings for only 32",
        ),
        (
            ZLAB.having({"dflash_config": {**INNER, "projector_type": "dspark", "markov_rank": 4}}),
            "tensors are missing",
        ),
        (ZLAB.having({"dflash_config": {**INNER, "output_multiplier": 2.0}}), "output_multiplier is 2.0: only 1.0"),
        (
            ZLAB.having({"dflash_config": {**INNER, "block_size": 1}}),
            "block_size is 1: a block must have at least 2 rows",
        ),
        (ZLAB.without(["hidden_norm.weight"]), "tensors are missing: hidden_norm.weight"),
        (ZLAB.having(tensors={"candidate_selector.x": torch.zeros(1)}), "does not use: candidate_selector.x"),
        (SPECULATORS.having({"aux_hidden_state_layer_ids": None}), "aux_hidden_state_layer_ids must list the layers"),
        (ZLAB.having({"dflash_config": {**INNER, "projector_type": "domino"}}), "Domino heads, .* are not supported"),
        (
            ZLAB.having({"architectures": ["Gemma4DSparkModel"]}),
            "Gemma4DSparkModel has Gemma layers, which are not supported",
        ),
        (
            ZLAB.having({"dflash_config": {**INNER, "projector_type": "magic"}}),
            "projector_type is 'magic': only dflash, ",
        ),
        (DSPARK.having({"markov_head_type": "lstm"}), "markov_head_type is 'lstm': only vanilla, gated and rnn"),
        (SELECTING.having({"selector_top_k": 33}), "selector_top_k must be 1 to 32, not 33"),
        (SELECTING.having({"conv_group_size": 5}), "conv_group_size must divide 16; they are 2 and 5"),
        (SPECULATORS.having({"markov_rank": 4}), "does not recognize: markov_rank"),
        (SPECULATORS.without(["d2t", "t2d"]), "has no d2t table"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsuitable_files_are_refused(case: Golden, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_head(str(case.save(tmp_path)), TARGET)
