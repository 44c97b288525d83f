"""A Medusa checkpoint in the forms of programs that cannot run here, made by renaming its keys."""

from __future__ import annotations

import re

from tests.heads.checkpoints import Golden


def as_vllm(case: Golden) -> Golden:
    """In the form that vllm/model_executor/models/medusa.py (0.9 to 0.32) reads."""
    num_heads = 1 + max(int(name.split(".")[0]) for name in case.tensors)
    num_blocks = case.config["medusa_num_layers"]
    tensors = {}
    for name, tensor in case.tensors.items():
        block = re.sub(r"(\d+)\.(\d+)\.linear\.(.*)", r"blocks.\1.layers.\2.\3", name)
        tensors[re.sub(r"(\d+)\.\d+\.weight", r"lm_heads.\1.weight", name) if block == name else block] = tensor
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 16,
        "vocab_size": 32,
        "num_heads": num_heads,
        "num_hidden_layers": num_blocks,
        "medusa_fc_bias": True,
        "max_paths": 64,
        "topk": 10,
    }
    return Golden(config, tensors, case.inputs, case.expected)


def as_joint(case: Golden) -> Golden:
    """In one checkpoint with the model that was trained with the heads (Medusa-2)."""
    tensors = {f"medusa_head.{name}": tensor for name, tensor in case.tensors.items()}
    some = case.tensors["0.0.linear.weight"]
    base = {"model.embed_tokens.weight": some, "model.layers.0.self_attn.q_proj.weight": some, "lm_head.weight": some}
    return Golden(
        {"model_type": "llama", "hidden_size": 16, "medusa_num_heads": 3},
        {**tensors, **base},
        case.inputs,
        case.expected,
    )
