"""New heads for a target, to be trained: EAGLE-3 and block drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.errors import ForedraftError
from foredraft.heads import DFlashConfig, DFlashHead, EagleConfig, EagleHead, TargetEnds
from foredraft.heads.config import Markov
from foredraft.heads.formats.layers import ROTARY_TYPES
from foredraft.model import LanguageModel

_ROPE_BASE = 10000.0
"""Of targets that do not rotate."""


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Inputs of an early, a middle and the last layer. Programs do not agree on a name for the output of the last layer."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, num_layers - 1}))


def frequent_ids(texts: Sequence[Sequence[int]], size: int | None, vocab_size: int) -> Tensor | None:
    """This many of the ids that occur most often, in ascending order; None: the whole vocabulary. If too few ids occur, others fill up
    the rest."""
    if size is None or size >= vocab_size:
        return None
    return _counts(texts, vocab_size).argsort(descending=True, stable=True)[:size].sort().values


def rarest_id(texts: Sequence[Sequence[int]], vocab_size: int) -> int:
    """The last of the ids that occur least often: one that occurs in no text, if possible."""
    counts = _counts(texts, vocab_size)
    return int((counts == counts.min()).nonzero()[-1])


def _counts(texts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """[vocab_size], how often each id occurs"""
    ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    return torch.bincount(ids, minlength=vocab_size)[:vocab_size]


def new_eagle3(
    target: LanguageModel,
    taps: Sequence[int],
    target_ids: Tensor | None,
    seed: int,
    num_layers: int = 1,
    intermediate_size: int | None = None,
) -> EagleHead:
    """A head with random weights in the target's widths; its lm_head begins as rows of the target's, and it borrows the target's
    embeddings. target_ids: what it can draft; None: all ids. intermediate_size: of the MLP; None: the target's. Raises
    ForedraftError for a target that has no such hidden states."""
    config = target.hf.config.get_text_config()
    check_taps(taps, config.num_hidden_layers)
    vocab_size = int(config.vocab_size)
    ends = TargetEnds(target.hf)
    head = EagleHead(
        EagleConfig(
            kind="eagle3",
            layer=_layer(LlamaConfig, config, num_layers, intermediate_size),
            taps=tuple(taps),
            target_hidden_size=config.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size if target_ids is None else len(target_ids),
            target_ids=target_ids,
        ),
        ends.embed,
        ends.lm_head,
    )
    _fill(head, lm_head_rows(target, target_ids), seed)
    return head


def new_block_head(
    target: LanguageModel,
    taps: Sequence[int],
    mask_token: int,
    seed: int,
    *,
    block_size: int,
    correction: Markov | None,
    num_layers: int = 1,
    intermediate_size: int | None = None,
) -> DFlashHead:
    """A head with random weights in the target's widths: DFlash or, with a correction, DSpark, which already drafts from the row of the
    pending token. It drafts all ids with the target's lm_head, and borrows its embeddings. See new_eagle3."""
    config = target.hf.config.get_text_config()
    check_taps(taps, config.num_hidden_layers)
    ends = TargetEnds(target.hf)
    head = DFlashHead(
        DFlashConfig(
            kind="dflash" if correction is None else "dspark",
            layer=_layer(Qwen3Config, config, num_layers, intermediate_size),
            taps=tuple(taps),
            target_hidden_size=config.hidden_size,
            vocab_size=int(config.vocab_size),
            draft_vocab_size=int(config.vocab_size),
            block_size=block_size,
            mask_token=mask_token,
            is_causal=(False,) * num_layers,
            drafts_from_anchor=correction is not None,
            correction=correction,
        ),
        ends.embed,
        ends.lm_head,
    )
    _fill(head, lm_head_rows(target, None), seed)
    for table in head.lm_heads:
        nn.init.zeros_(table.weight)  # type: ignore[arg-type]
    return head


def _fill(head: EagleHead | DFlashHead, rows: Tensor, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # NaN, so that a weight that is not initialised below shows in the first step
        head.load_state_dict(
            {name: torch.full(w.shape, torch.nan) for name, w in head.state_dict().items()}, assign=True
        )
        _initialise(head)
    head.lm_head.weight.data.copy_(rows)


def lm_head_rows(target: LanguageModel, ids: Tensor | None) -> Tensor:
    """See TargetEnds. Raises ForedraftError for a target whose lm_head does not read what its layers write."""
    rows = TargetEnds(target.hf).lm_head_rows(ids)
    width = target.hf.config.get_text_config().hidden_size
    if rows.shape[1] != width:
        raise ForedraftError(
            f"{target.traits.name}: its lm_head reads {rows.shape[1]} numbers, but its layers write {width}: a head cannot be trained "
            "for it; train an early exit or a draft model"
        )
    return rows


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raises ForedraftError unless the taps are inputs of layers."""
    if not taps or min(taps) < 0 or max(taps) >= num_layers:
        raise ForedraftError(f"--taps must be inputs of layers, 0 to {num_layers - 1}, not {list(taps)}")


def _layer(
    form: type[Any], config: PretrainedConfig, num_layers: int, intermediate_size: int | None
) -> PretrainedConfig:
    """A configuration as wide as the target's layers. intermediate_size: see new_eagle3."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer: PretrainedConfig = form(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=_rope_parameters(config),
    )
    return layer


def _rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """How a new head rotates: as its target does, where heads can; else whole attention heads, with the target's base."""
    given = getattr(config, "rope_parameters", None) or {}
    given = given.get("full_attention", given)  # some targets have kinds of layers that rotate differently
    is_whole = given.get("partial_rotary_factor", 1.0) == 1.0
    if is_whole and given.get("rope_type", "default") in ROTARY_TYPES:
        return {"rope_theta": _ROPE_BASE, **given}
    return {"rope_type": "default", "rope_theta": given.get("rope_theta", _ROPE_BASE)}


def _initialise(head: nn.Module) -> None:
    """Scale matrices by the inverse root of their input size; those that write to the residual stream begin smaller. Biases begin as 0."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name.endswith(("o_proj", "down_proj")):
                module.weight.data.mul_(0.1)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, LlamaRMSNorm):
            nn.init.ones_(module.weight)
