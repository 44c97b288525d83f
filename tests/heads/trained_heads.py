"""An EAGLE-3 head for the embedded target, trained for a minute or two, which is enough to draft far better than a random one."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path

import torch

from foredraft.heads.saving import save_eagle3
from foredraft.model import EMBEDDED, LoadOptions, load_model
from foredraft.train import Data, Eagle3Kind, Recipe, train_head
from foredraft.train.head_student import frequent_ids, new_eagle3

TARGET = str(EMBEDDED / "target")
TAPS = (2, 4, 7)
_MODULES = ("argparse", "ast", "calendar", "csv", "difflib", "heapq", "inspect", "pickle", "random", "shutil")


def train_small_head(folder: Path) -> Path:
    """Train a head in speculators' form, with norm_before_residual and half of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    texts, library = folder / "texts.txt", Path(sysconfig.get_paths()["stdlib"])
    texts.write_text("\n<|endoftext|>\n".join((library / f"{name}.py").read_text() for name in _MODULES))
    target = load_model(TARGET, LoadOptions(device="cpu"))
    new = new_eagle3(target, TAPS, frequent_ids([range(2048)], 2048, 4096), seed=0)
    new.config = replace(new.config, norm_before_residual=True)
    save_eagle3(new, folder / "new", TARGET, ["LlamaForCausalLM"], torch.float32)
    kind = Eagle3Kind(num_steps=2, init=str(folder / "new"))
    train_head(TARGET, Data((texts,)), kind, Recipe(steps=120, context=96, batch_size=4), folder / "head")
    return folder / "head"
