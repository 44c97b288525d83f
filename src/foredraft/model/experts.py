"""Our mixture of experts, registered in the interface through which transformers routes the experts of its models.

The library's own functions either run an expert on a single row, or add up a token's experts in an order that depends on the batch; here
a row's bits depend only on the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from foredraft.model.rows import RowRule, rule_for

NAME = "foredraft"


def run_experts(module: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Run each row through its experts, and sum with its weights, first choice first. Ids past the last expert add nothing.

    hidden: [T, D], expert_ids: [T, k], weights: [T, k] -> [T, D]
    """
    rule = rule_for([tuple(_up(module).shape), tuple(module.down_proj.shape)])
    num_choices = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=module.num_experts)[: module.num_experts].tolist()
    order = order[: sum(counts)]
    groups = torch.split(hidden[order // num_choices], counts)
    outputs = hidden.new_zeros(flat.shape[0], hidden.shape[1])
    outputs[order] = torch.cat(
        [_run_one(module, expert, rows, rule) for expert, rows in enumerate(groups) if len(rows)] or [groups[0]]
    )
    parts = outputs.view(-1, num_choices, hidden.shape[1]).float() * weights.float()[..., None]
    total = parts[:, 0]
    for choice in range(1, num_choices):
        total = total + parts[:, choice]
    return total.to(hidden.dtype)


def _run_one(module: Any, expert: int, rows: Tensor, rule: RowRule) -> Tensor:
    """rows: [R, D] -> [R, D]"""
    num_rows = rows.shape[0]
    if rule.pad(num_rows) > num_rows:
        rows = nn.functional.pad(rows, (0, 0, 0, rule.pad(num_rows) - num_rows))
    inner = _linear(module, rows, _up(module)[expert], _bias(module, _up_name(module), expert))
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _linear(module, inner, module.down_proj[expert], _bias(module, "down_proj", expert))
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return out[:num_rows]


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _up(module: Any) -> Tensor:
    up: Tensor = getattr(module, _up_name(module))
    return up


def _bias(module: Any, name: str, expert: int) -> Tensor | None:
    return getattr(module, f"{name}_bias")[expert] if module.has_bias else None


def _linear(module: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight: [out, in], or [in, out] if the module is_transposed."""
    out_by_in = weight.T if module.is_transposed else weight
    return nn.functional.linear(rows, out_by_in, bias)


ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
