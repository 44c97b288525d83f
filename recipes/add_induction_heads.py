"""Add induction heads to an EAGLE-3 head, so that it can copy (foredraft.train.induction).

    python recipes/add_induction_heads.py HEAD TARGET CHATS OUT [NEURONS]

HEAD: of one Llama layer. CHATS: conversations of TARGET, the chats.jsonl of a `foredraft train head` run. The result drafts at once; train
it further with `foredraft train head --init OUT`. To keep the file small, the NEURONS of its MLP with the smallest weights are removed.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from foredraft.heads import EagleHead
from foredraft.model import LoadOptions, load_model
from foredraft.train import Eagle3Kind
from foredraft.train.blocks import pack, spread_indices
from foredraft.train.induction import with_induction_heads

LENGTH, NUM_BLOCKS = 512, 120


def without_neurons(head: EagleHead, number: int) -> EagleHead:
    layer = copy.deepcopy(head.config.layer)
    layer.intermediate_size -= number
    narrow = head.of_form(replace(head.config, layer=layer))
    weights = {name: weight.detach() for name, weight in head.state_dict().items()}
    gate, up, down = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    sizes = weights[gate].norm(dim=1) * weights[up].norm(dim=1) * weights[down].norm(dim=0)
    kept = sizes.argsort(descending=True)[: layer.intermediate_size].sort().values
    weights |= {gate: weights[gate][kept], up: weights[up][kept], down: weights[down][:, kept]}
    narrow.load_state_dict(weights, assign=True)
    return narrow


def main() -> None:
    source, target_name, chats, out = sys.argv[1:5]
    num_neurons = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    target = load_model(target_name, LoadOptions(device="cpu"))
    target.take_over()
    kind = Eagle3Kind.of_head(source, target)
    texts = [json.loads(line) for line in Path(chats).read_text(encoding="utf-8").splitlines()]
    blocks = pack(texts, LENGTH, None)
    sample = blocks.select(spread_indices(len(blocks), NUM_BLOCKS))
    head = with_induction_heads(without_neurons(kind.load(source, target), num_neurons), target, sample.ids.long())
    Path(out).mkdir(parents=True, exist_ok=True)
    kind.save(head, target, target_name, Path(out), torch.float32)


if __name__ == "__main__":
    main()
