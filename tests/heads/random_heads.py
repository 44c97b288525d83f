"""Directories with random heads for a target. They draft badly, but otherwise behave like trained ones."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from foredraft.heads import AnyHead, TargetShape, attach_head, attach_mtp
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats.dflash import CORRECTION_PREFIXES, read_speculators
from foredraft.heads.loading import module_of
from foredraft.model import EMBEDDED, LanguageModel
from tests.heads.mtp_targets import embedded_mtp

HEAD_METHODS = ("eagle", "peagle", "dflash", "medusa", "early_exit")
OWN_DRAFT_METHODS = (*HEAD_METHODS, "pard", "mtp")
"""Methods that need a checkpoint of their own, and cannot use the embedded draft model."""

MASK_TOKEN = 300


@cache
def embedded_head(method: str) -> Path:
    """The directory of a random head for the embedded target."""
    config, folder = AutoConfig.from_pretrained(EMBEDDED / "target"), Path(mkdtemp())
    if method == "early_exit":
        return save_early_exit(config, folder)
    if method == "peagle":
        return save_peagle(config, folder)
    if method == "dflash":
        return save_dflash(config, folder)
    return save_eagle3(config, folder, draft_vocab_size=1024) if method == "eagle" else save_medusa(config, folder)


def random_head(method: str, target: LanguageModel) -> AnyHead | None:
    """A random head, attached to the embedded target; None for a method that needs no head."""
    if method == "mtp":
        return attach_mtp(str(embedded_mtp()), target)
    return attach_head(str(embedded_head(method)), target) if method in HEAD_METHODS else None


def head_settings(method: str) -> dict[str, Path]:
    """The arguments of LLM that the method needs, with the embedded target."""
    if method == "pard":
        return {"draft_model": embedded_pard()}
    if method == "mtp":
        return {"model": embedded_mtp()}
    return {"draft_model": embedded_head(method)} if method in HEAD_METHODS else {}


@cache
def embedded_pard() -> Path:
    """The embedded draft as a model with mask tokens. It was not trained to read them, so only its first draft token is good. The mask is
    a token that also occurs in texts."""
    folder = Path(shutil.copytree(EMBEDDED / "draft", Path(mkdtemp()) / "pard"))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "spd_type": "pard", "pard_token": MASK_TOKEN}))
    return folder


def save_eagle3(config: PretrainedConfig, folder: Path, *, draft_vocab_size: int | None = None, seed: int = 0) -> Path:
    """Save a head in SafeAILab's form that uses the target's embedding and has its own lm_head. config: the target's."""
    width, vocab_size = config.hidden_size, config.vocab_size
    size = vocab_size if draft_vocab_size is None else draft_vocab_size
    head_dim = width // config.num_attention_heads
    kv_width = config.num_key_value_heads * head_dim
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv_width, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv_width, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.mlp.gate_proj.weight": (2 * width, width),
        "midlayer.mlp.up_proj.weight": (2 * width, width),
        "midlayer.mlp.down_proj.weight": (width, 2 * width),
        "lm_head.weight": (size, width),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(width) for name in norms}
    tensors |= _table(size, vocab_size)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "draft_vocab_size": size,
    }
    return _save(folder, settings, tensors, "model.safetensors")


def save_peagle(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Save the head of save_eagle3 in speculators' form, with one more layer and a mask token that also occurs in texts. config: the
    target's."""
    old = save_eagle3(config, folder / "eagle3", draft_vocab_size=1024, seed=seed)
    tensors = {
        name.replace("midlayer.", "layers.0."): each for name, each in load_file(old / "model.safetensors").items()
    }
    settings, width = json.loads((old / "config.json").read_text()), config.hidden_size
    for name in [name for name in tensors if name.startswith("layers.0.") and "hidden_norm" not in name]:
        is_wide = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        tensors[name.replace("layers.0.", "layers.1.")] = (
            tensors[name][..., :width].clone() if is_wide else tensors[name].clone()
        )
    generator = torch.Generator().manual_seed(seed)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * width, generator=generator)
    about = ("architectures", "draft_vocab_size")
    return _save(
        folder,
        {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "mask_token_id": MASK_TOKEN,
            "draft_vocab_size": settings["draft_vocab_size"],
            "norm_before_residual": False,
            "transformer_layer_config": {key: value for key, value in settings.items() if key not in about},
        },
        tensors,
        "model.safetensors",
    )


@cache
def embedded_block_head(kind: str) -> Path:
    """A block drafter for the embedded target whose tokens depend on those before. kind: of BLOCK_KINDS."""
    config = AutoConfig.from_pretrained(EMBEDDED / "target")
    return save_dflash(config, Path(mkdtemp()), correction=BLOCK_KINDS[kind])


_RANK = 8
BLOCK_KINDS: dict[str, dict[str, object]] = {
    "dspark": {"markov_rank": _RANK},
    "dspark-gated": {"markov_rank": _RANK, "markov_head_type": "gated"},
    "dspark-rnn": {"markov_rank": _RANK, "markov_head_type": "rnn"},
    "dflash2": {"selector_rank": _RANK, "selector_top_k": 20, "conv_kernel_size": 2, "conv_group_size": 16},
    "xpress": {"xpress_rank": _RANK},
}
"""The settings of the corrections, in speculators' form."""


def save_dflash(
    config: PretrainedConfig, folder: Path, seed: int = 0, correction: dict[str, object] | None = None
) -> Path:
    """Save a block drafter with two layers, a block of five rows and a mask token that also occurs in texts: in z-lab's form, or in
    speculators' with one of BLOCK_KINDS. config: the target's."""
    width, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    kv_width = config.num_key_value_heads * head_dim
    shapes = {"fc.weight": (width, 2 * width)}
    for index in range(2):
        shapes |= {
            f"layers.{index}.self_attn.q_proj.weight": (width, width),
            f"layers.{index}.self_attn.k_proj.weight": (kv_width, width),
            f"layers.{index}.self_attn.v_proj.weight": (kv_width, width),
            f"layers.{index}.self_attn.o_proj.weight": (width, width),
            f"layers.{index}.mlp.gate_proj.weight": (2 * width, width),
            f"layers.{index}.mlp.up_proj.weight": (2 * width, width),
            f"layers.{index}.mlp.down_proj.weight": (width, 2 * width),
        }
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors |= {f"layers.{index}.{name}.weight": torch.ones(width) for index in range(2) for name in norms}
    names = ("q_norm", "k_norm")
    tensors |= {f"layers.{index}.self_attn.{name}.weight": torch.ones(head_dim) for index in range(2) for name in names}
    tensors |= {"hidden_norm.weight": torch.ones(width), "norm.weight": torch.ones(width)}
    settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "num_target_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }
    if correction is not None:
        return _save_corrected(folder, settings, tensors, correction, generator)
    inner = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 5]}
    return _save(folder, {**settings, "block_size": 5, "dflash_config": inner}, tensors, "model.safetensors")


def _save_corrected(
    folder: Path,
    layers: dict[str, Any],
    tensors: dict[str, Tensor],
    correction: dict[str, object],
    generator: torch.Generator,
) -> Path:
    """Save it with a correction whose weights are large enough, compared with those of the lm_head, that the previous token matters."""
    kind = next(kind for kind, known in BLOCK_KINDS.items() if known is correction).partition("-")[0]
    settings = {
        "speculators_model_type": kind,
        "aux_hidden_state_layer_ids": [2, 6],
        "mask_token_id": MASK_TOKEN,
        "block_size": 5,
        "draft_vocab_size": layers["vocab_size"],
        "transformer_layer_config": {key: each for key, each in layers.items() if key != "num_target_layers"},
        **correction,
    }
    head = HeadFiles("", {**settings, "speculators_version": "0.9.0"}, tensors)
    target = TargetShape(layers["num_target_layers"], layers["hidden_size"], layers["vocab_size"])
    expected = module_of(read_speculators(head, target)).state_dict()
    names = {name: name.replace("correction.", CORRECTION_PREFIXES[kind]) for name in expected.keys() - tensors.keys()}
    for name in sorted(names):
        tensors[names[name]] = 0.3 * torch.randn(expected[name].shape, generator=generator)
    return _save(folder, settings, tensors, "model.safetensors")


def save_medusa(config: PretrainedConfig, folder: Path, num_heads: int = 4, seed: int = 0) -> Path:
    """Save heads in the legacy form, a state dict in a .pt file. config: the target's."""
    width = config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width, generator=generator) * width**-0.5
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.1.weight"] = torch.randn(config.vocab_size, width, generator=generator) * width**-0.5
    settings = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "base_model_name_or_path": "target"}
    return _save(folder, settings, tensors, "medusa_lm_head.pt")


def save_early_exit(
    config: PretrainedConfig, folder: Path, layer: int = 3, adapter_size: int = 64, seed: int = 0
) -> Path:
    """Save an early exit as training does: a norm, and an adapter if adapter_size is above 0. config: the target's."""
    width = config.hidden_size
    shapes = {"gate_proj": (adapter_size, width), "up_proj": (adapter_size, width), "down_proj": (width, adapter_size)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {"norm.weight": torch.ones(width)}
    if adapter_size:
        tensors["adapter.norm.weight"] = torch.ones(width)
        for name, shape in shapes.items():
            tensors[f"adapter.{name}.weight"] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    settings = {
        "architectures": ["EarlyExitDraftModel"],
        "speculators_model_type": "early_exit",
        "early_exit_layer": layer,
        "adapter_size": adapter_size,
        "target_hidden_size": width,
    }
    return _save(folder, settings, tensors, "model.safetensors")


def _table(size: int, vocab_size: int) -> dict[str, Tensor]:
    """The tables of a reduced vocabulary with evenly spread ids of the target; nothing if it has all of them."""
    if size == vocab_size:
        return {}
    ids = torch.arange(size) * vocab_size // size
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": marks}


def _save(folder: Path, settings: dict[str, object], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder
