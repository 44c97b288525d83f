"""transformers' own greedy text, and the comparison with it that every greedy test uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.model.taps import FINAL_NORM

TIE = 1e-3
"""Two float32 programs may differ only where the reference's best two logits are closer than this."""


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The text that `generate` writes after each prompt, one at a time."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def assert_same_as_reference(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
) -> None:
    """Assert equal texts up to near ties. The first difference is printed with the reference's top-two margin, and fails above TIE."""
    assert len(ours) == len(reference) == len(prompts)
    for index, (prompt, own, theirs) in enumerate(zip(prompts, ours, reference, strict=True)):
        if list(own) == list(theirs):
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), min(len(own), len(theirs))
        )
        found = (
            f"prompt {index}, token {place} of {len(theirs)}: {own[place : place + 1]} for {theirs[place : place + 1]}"
        )
        assert place < min(len(own), len(theirs)), f"{found}: one text is shorter"
        margin = _margin(model, [*prompt, *theirs[:place]])
        print(f"{found}; the reference's top-two margin there is {margin:.2e}")
        assert margin <= TIE, f"{found}; the reference's top-two margin there is {margin:.2e}"


@torch.inference_mode()
def _margin(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    best, second = logits.double().topk(2).values.tolist()
    return float(best - second)


@torch.inference_mode()
def hidden_states(hf: PreTrainedModel, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """transformers' own hidden states, numbered as model.Body numbers taps, concatenated: [T, len(taps) * hidden]."""
    norm = hf.base_model.ln_f if hasattr(hf.base_model, "ln_f") else hf.base_model.norm
    before_norm: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    states = hf(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    numbered = {**dict(enumerate(states[:-1])), len(states) - 1: before_norm[0], FINAL_NORM: states[-1]}
    return torch.cat([numbered[tap][0] for tap in taps], dim=-1)
