"""The average of EAGLE heads of one form, such as the results of several training runs (model soups, arXiv:2203.05482): of EAGLE-3 heads
in eight bits, of EAGLE-1 heads in bfloat16.

    python recipes/average_heads.py TARGET OUT HEAD HEAD ...

HEADS: of the same form, one trained from the other or from a common ancestor; the average of unrelated heads is worthless.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from foredraft.errors import ForedraftError
from foredraft.heads import EagleHead, TargetShape, load_head
from foredraft.heads.quantized import quantize_head
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train import Eagle1Kind, Eagle3Kind


def average(heads: Sequence[EagleHead]) -> EagleHead:
    """The first head with the mean of all weights. Raises ForedraftError for heads of different forms, or that read other layers or
    draft other ids."""
    if any(_inputs_and_ids(head) != _inputs_and_ids(heads[0]) for head in heads):
        raise ForedraftError("the heads read different layers or draft different ids: they cannot be averaged")
    states = [head.state_dict() for head in heads]
    shapes = [{name: weight.shape for name, weight in state.items()} for state in states]
    if any(each != shapes[0] for each in shapes):
        raise ForedraftError("the heads have different forms: only heads of one form can be averaged")
    means = {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
    heads[0].load_state_dict(means, assign=True)
    return heads[0]


def _inputs_and_ids(head: EagleHead) -> tuple[tuple[int, ...], list[int] | None]:
    ids = head.config.target_ids
    return head.config.taps, None if ids is None else ids.tolist()


def kind_of(source: str, target: LanguageModel) -> Eagle1Kind | Eagle3Kind:
    if load_head(source, TargetShape.of(target.hf.config)).config.kind == "eagle1":
        return Eagle1Kind(init=source)
    return Eagle3Kind.of_head(source, target)


def main() -> None:
    target_name, out, *sources = sys.argv[1:]
    target = load_model(target_name, LoadOptions(device="cpu"))
    target.take_over()
    kind = kind_of(sources[0], target)
    head = average([kind.load(source, target) for source in sources])
    Path(out).mkdir(parents=True, exist_ok=True)
    kind.save(head, target, target_name, Path(out), torch.bfloat16)
    if isinstance(kind, Eagle3Kind):
        quantize_head(Path(out))


if __name__ == "__main__":
    main()
