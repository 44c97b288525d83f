"""EAGLE-1 heads that project the target's states: the module, training and compiled kernels agree, and bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from foredraft.errors import ModelError
from foredraft.heads import CompiledEagle, EagleConfig, EagleHead, TargetShape, load_head
from foredraft.heads.saving import save_eagle1
from foredraft.heads.unrolled import unroll
from foredraft.kernels import InMemory, load_kernels, why_none
from tests.heads.running import run
from tests.heads.test_unrolled import NUM_STEPS, drafted_behind

TARGET = TargetShape(num_layers=6, hidden_size=24, vocab_size=64)
IDS = [5, 9, 9, 41, 3, 60, 17, 22, 8, 30]


def new_head(num_layers: int = 1) -> EagleHead:
    """A head that is wider than the target's states, which are projected."""
    layer = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    config = EagleConfig(
        kind="eagle1",
        layer=layer,
        taps=(1, 4),
        target_hidden_size=24,
        vocab_size=64,
        draft_vocab_size=64,
        num_fused_layers=0,
        fc_norm=True,
        norm_output=True,
        projects_features=True,
        owns_embeddings=True,
    )
    head = EagleHead(config, lambda ids: ids, lambda x: x)
    generator = torch.Generator().manual_seed(num_layers)
    weights = {
        name: (1 + 0.1 * torch.randn(w.shape, generator=generator))
        if w.ndim == 1
        else w.shape[-1] ** -0.5 * torch.randn(w.shape, generator=generator)
        for name, w in head.state_dict().items()
    }
    head.load_state_dict(weights, assign=True)
    return head.requires_grad_(False).eval()


def features(num_rows: int) -> Tensor:
    return 3 * torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(7))


def saved(folder: Path) -> Path:
    save_eagle1(new_head(), folder, "target", ["LlamaForCausalLM"], torch.float32)
    return folder


@pytest.mark.parametrize("num_layers", [1, 2])
def test_rows_read_in_pieces_give_the_same_results(num_layers: int) -> None:
    head = new_head(num_layers)
    whole, pieces = (run(head, IDS, features(7), chunks) for chunks in (None, [1, 4, 2]))
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_layers", [1, 2])
@torch.inference_mode()
def test_every_row_of_every_training_step_equals_the_engines(num_layers: int) -> None:
    head, rows = new_head(num_layers), features(len(IDS))
    steps = list(unroll(head, rows[None], torch.tensor([IDS]), NUM_STEPS))
    for position in range(len(IDS) - NUM_STEPS + 1):
        for step, logits in enumerate(drafted_behind(head, IDS, rows, position)):
            torch.testing.assert_close(steps[step][0, position], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_compiled_states_and_logits_are_those_of_the_module(num_layers: int) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip(f"no compiled kernels here: {why_none()}")
    plain, half = new_head(num_layers), new_head(num_layers).bfloat16()
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    rows = features(7).bfloat16()
    unused = torch.zeros(64, 32, dtype=torch.bfloat16)
    compiled = CompiledEagle(half, unused, kernels.pack(InMemory(unused)), kernels)
    expected, got = run(plain, IDS, rows.float()), run(compiled, IDS, rows)  # type: ignore[arg-type]
    for part in ("states", "logits"):
        error = (got[part].float() - expected[part]).norm(dim=-1) / expected[part].norm(dim=-1)
        assert error.max() < 0.04, part


def test_a_saved_head_is_loaded_again(tmp_path: Path) -> None:
    checkpoint, head = load_head(str(saved(tmp_path)), TARGET), new_head()
    assert checkpoint.config == EagleConfig(**{**vars(head.config), "training_len": 128})
    for name, weight in head.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_hidden_state_layer_ids": [1, 6]}, "it reads the inputs of the layers"),
        ({"aux_hidden_state_layer_ids": None}, "it reads the inputs of the layers"),
        ({"draft_vocab_size": 32}, "it drafts 32 ids, but the target has 64: it belongs to another target"),
        ({"norm_before_residual": True}, "keys that foredraft does not recognize: norm_before_residual"),
    ],
)
def test_files_for_another_target_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    config = saved(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ModelError, match=message):
        load_head(str(tmp_path), TARGET)


def test_another_head_cannot_be_saved_in_this_form(tmp_path: Path) -> None:
    head = new_head()
    head.config = EagleConfig(**{**vars(head.config), "projects_features": False})
    with pytest.raises(ValueError, match="EAGLE-1 heads that project features"):
        save_eagle1(head, tmp_path, "target", [])
