"""The embedded draft with permuted ids: another vocabulary, whose tokens have the same text as the target's."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from foredraft.model import EMBEDDED

DRAFT = EMBEDDED / "draft"
EMBEDDING = "model.embed_tokens.weight"


@cache
def permuted_draft() -> Path:
    """A folder with the embedded draft, its tokens and weights in another order. It computes what the draft does."""
    folder = Path(mkdtemp(prefix="permuted-draft-"))
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_bytes())
    new_ids = list(range(len(tokenizer["model"]["vocab"])))
    Random(5).shuffle(new_ids)
    tokenizer["model"]["vocab"] = {token: new_ids[old] for token, old in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    for token in tokenizer["post_processor"]["special_tokens"].values():
        token["ids"] = [new_ids[old] for old in token["ids"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DRAFT / "tokenizer_config.json", folder)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps(_with_ids(json.loads((DRAFT / name).read_bytes()), new_ids)))
    weights = load_file(DRAFT / "model.safetensors")
    places = torch.tensor(new_ids).argsort()
    for name in {EMBEDDING, "lm_head.weight"} & weights.keys():
        weights[name] = weights[name][places].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _with_ids(config: dict[str, Any], new_ids: list[int]) -> dict[str, Any]:
    return {
        name: new_ids[value] if name.endswith("_token_id") and isinstance(value, int) else value
        for name, value in config.items()
    }
