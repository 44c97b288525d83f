"""Stored layers replace those of a model: one by one, and experts as parts of one parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.model.quantized.gptq import Gptq
from foredraft.model.quantized.plan import Plan
from foredraft.model.quantized.skeleton import Skeleton
from foredraft.model.quantized.tensors import LayerTensors, TensorFiles, UnreadableError
from foredraft.model.stored import StoredExperts, StoredLinear
from tests.model.quantized.packers import Kind, gptq, save_quantized, save_quantized_experts
from tests.model.zoo import SPECIES, random_model

EXPERT = "model.layers.0.block_sparse_moe.experts.3"


def planned(directory: Path, species: str, kind: Kind, spoil: Callable[[dict[str, Tensor]], object] = len) -> Plan:
    """The plan for all layers of a checkpoint with changed tensors."""
    file = directory / "model.safetensors"
    state = load_file(file)
    spoil(state)
    save_file(state, file)
    files = TensorFiles(directory)
    reader = Gptq(kind.settings)
    plan = Plan(Skeleton(SPECIES[species].config(), torch.float32, trust_remote_code=False))
    layers = {reader.layer_of(name, files.dtype(name)) for name in files} - {None}
    for layer in sorted(str(layer) for layer in layers):
        reader.place(LayerTensors(files, layer), plan)
    return plan


def skeleton_model(species: str) -> torch.nn.Module:
    return Skeleton(SPECIES[species].config(), torch.float32, trust_remote_code=False).model


def mixture(directory: Path, kind: Kind, spoil: Callable[[dict[str, Tensor]], object] = len) -> Plan:
    save_quantized_experts(random_model(SPECIES["mixtral"].config()), directory, kind)
    return planned(directory, "mixtral", kind, spoil)


def test_linear_layers_are_replaced_and_keep_their_biases(tmp_path: Path) -> None:
    save_quantized(random_model(SPECIES["qwen2"].config()), tmp_path, gptq())
    plan = planned(tmp_path, "qwen2", gptq())
    assert plan.biases["model.layers.0.self_attn.q_proj.bias"] == "model.layers.0.self_attn.q_proj.bias"
    assert len(plan.biases) == 2 * 3
    assert not plan.has_head()
    model = skeleton_model("qwen2")
    plan.apply(model, torch.float32)
    attention = model.get_submodule("model.layers.1.self_attn")
    assert isinstance(attention.k_proj, StoredLinear)
    assert attention.k_proj.bias is not None
    assert attention.o_proj.bias is None


def test_experts_are_replaced_together(tmp_path: Path) -> None:
    plan = mixture(tmp_path, gptq())
    model = skeleton_model("mixtral")
    plan.apply(model, torch.bfloat16)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts.gate_up_proj, StoredExperts)
    assert experts.gate_up_proj.shape == (4, 192, 64)
    assert experts.down_proj[2].dtype == torch.bfloat16


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    def without_gate(state: dict[str, Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del state[f"{EXPERT}.w1.{part}"]

    plan = mixture(tmp_path, gptq(), without_gate)
    with pytest.raises(UnreadableError, match=r"layers.0.mlp.experts.gate_up_proj lacks weights for expert 3"):
        plan.apply(skeleton_model("mixtral"), torch.float32)


def test_experts_with_act_order_or_biases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"is an expert with act-order \(g_idx\) or a bias"):
        mixture(tmp_path, gptq(act_order=True))
    with pytest.raises(UnreadableError, match=r"experts.3.w2 is an expert with act-order \(g_idx\) or a bias"):
        mixture(tmp_path, gptq(), lambda state: state.update({f"{EXPERT}.w2.bias": torch.ones(64)}))
    mixture(tmp_path, gptq(), lambda state: state.update({f"{EXPERT}.w2.bias": torch.zeros(64)}))
