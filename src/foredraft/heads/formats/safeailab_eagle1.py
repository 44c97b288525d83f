"""EAGLE-1 and 2 as SafeAILab writes them: fc, then a Llama layer without an input norm."""

from __future__ import annotations

from foredraft.heads.config import EagleConfig, HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.base import HeadFormat
from foredraft.heads.formats.layers import count_layers, read_layers
from foredraft.heads.settings import Settings
from foredraft.heads.vocabulary import TOKEN_MAP, mapped_ids, reduced
from foredraft.model.taps import FINAL_NORM


def matches(files: HeadFiles) -> bool:
    return "fc.weight" in files.tensors and any(name.startswith("layers.0.") for name in files.tensors)


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    weights = {name: tensor for name, tensor in files.tensors.items() if name != TOKEN_MAP}
    settings = Settings(files.config)
    settings.take(("bias",))  # whether fc has one: taken from the tensors
    draft_vocab_size = settings.get("truncated_vocab_size")
    logit_scale = float(settings.get("logit_scale", 1.0))
    layer = read_layers(settings, count_layers(weights))
    settings.refuse_unread()
    target_ids = mapped_ids(files.tensors.get(TOKEN_MAP), draft_vocab_size, layer.vocab_size)
    if "lm_head.weight" in weights:
        weights["lm_head.weight"] = reduced(weights["lm_head.weight"], target_ids)
    width = layer.vocab_size if target_ids is None else len(target_ids)
    config = EagleConfig(
        kind="eagle1",
        layer=layer,
        taps=(FINAL_NORM,),
        target_hidden_size=layer.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=width,
        target_ids=target_ids,
        num_fused_layers=0,
        fc_bias="fc.bias" in weights,
        input_norm="layers.0.input_layernorm.weight" in weights,
        final_norm="norm.weight" in weights,
        owns_embeddings="embed_tokens.weight" in weights,
        owns_lm_head="lm_head.weight" in weights,
        logit_scale=logit_scale,
        training_len=getattr(layer, "max_position_embeddings", None),
    )
    return HeadCheckpoint(config, weights)


FORMAT = HeadFormat("SafeAILab EAGLE-1 and 2", matches, read)
