"""What trees of a head could gain over chains: computed from recorded acceptance and stated costs, not timed.

    python -m benchmarks.drafters.tree_gains HEAD --model MODEL [--quantization int8] [--texts chats|code|stories]
        [--temperatures 0 0.8 1] [--questions 40] [--max-tokens 160] [--out FILE.md]

MODEL answers MT-bench's first questions without drafts, or continues code or stories; above temperature 0 with a seed. At every position of
the answers, the head says which tokens it would draft there, and later in a draft after the text's own tokens, best first: at temperature 0
by q, else by log q plus the noise that the text was drawn with. The rank of the text's token decides whether a tree has it. So one record
serves every shape.

For every cost curve, the shapes considered have the likeliest nodes by the counted rates, up to every number of levels and nodes. The best
chain and the best tree by these rates then walk through the answers. Speeds are relative to plain decoding. Chains are verified with the
same noise as trees here, as those of greedy and seeded requests are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.drafters.trees import prompts_of
from foredraft import LLM, SamplingParams
from foredraft.engine.token_tree import TreeShape
from foredraft.policy.tree_acceptance import best_first
from foredraft.sampling.noise import exponentials, stream_keys
from foredraft.train.head_acceptance import HeadOnTexts

MOST_LEVELS, MOST_SIBLINGS, SEED = 8, 8, 1234


@dataclass(frozen=True)
class Costs:
    """In passes of one row. passes: of 1, 2, ... rows; further ones go on like the last. draft, level: of a draft, and of each of its
    levels. most_nodes: of a tree."""

    passes: Sequence[float]
    draft: float
    level: float
    most_nodes: int

    def of_step(self, shape: TreeShape) -> float:
        last, num_more = len(self.passes) - 1, max(len(shape) + 1 - len(self.passes), 0)
        slope = self.passes[last] - self.passes[last - 1]
        return self.passes[min(len(shape), last)] + num_more * slope + self.draft + self.level * shape.depth


CURVES = {
    "SmolLM2 in int8, two cores": Costs((1, 1.01, 1.02, 1.04, 1.09, 1.13, 1.18, 1.24, 1.32), 0.13, 0.023, 12),
    "its copy of 1.8 billion parameters": Costs((1, 1.02, 1.03, 1.05, 1.07, 1.1, 1.14, 1.18, 1.23), 0.02, 0.05, 12),
    "Medusa, the 0.4 B copy in int8, two cores": Costs(
        (1, 1.02, 1.04, 1.06, 1.08, 1.11, 1.15, 1.19, 1.25), 0.05, 0.0, 12
    ),
    "a GPU: 64 rows cost a tenth more, a level 0.06": Costs((1, 1 + 0.1 / 63), 0.0, 0.06, 63),
}
"""The first two as measured on an EPYC with AVX-512 (benchmarks/controller/recorded_chats.py), the third on a Xeon with AMX
(benchmarks/kernels/passes.py), the last as an example."""

Ranks = list[list[int]]
"""For each token of an answer, by its place in a draft, as far as the head drafts: its rank among the tokens that the head would draft
there, from 0."""


def recorded(llm: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int) -> Iterator[Ranks]:
    """llm: with the head. -> for each answer"""
    head = HeadOnTexts(llm)
    for number, prompt in enumerate(prompts):
        seed = SEED + number if temperature else None
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, speculative_tokens=0)
        [answer] = llm.generate([prompt], params)
        tokens = [*prompt, *answer.outputs[0].token_ids]
        new = torch.tensor(tokens[len(prompt) :])
        noise = None if seed is None else shared_noise(seed, len(new), llm.target.traits.vocab_size)
        places = (logits[len(prompt) :] for logits in head.logits(tokens, MOST_LEVELS))
        yield ranks_of(new, places, temperature, noise)


def shared_noise(seed: int, num_tokens: int, vocab_size: int) -> Tensor:
    """With which the tokens of an answer are drawn. -> [num_tokens, vocab_size]"""
    return exponentials(stream_keys(seed, 0, 0, num_tokens), torch.arange(vocab_size))


def ranks_of(new: Tensor, places: Iterable[Tensor], temperature: float, noise: Tensor | None) -> Ranks:
    """The ranks of an answer's tokens in the order in which the head drafts (see verify/coupled.py); MOST_SIBLINGS for a token that it
    cannot draft, or where no draft reaches back that far. new: [N]. places: the head's logits by place in a draft, [N, V]. noise: [N, V],
    None if the answer was not drawn"""
    by_place = [_ranks_at(new, logits, temperature, noise) for logits in places]
    return [list(ranks) for ranks in zip(*by_place, strict=True)]


def _ranks_at(new: Tensor, logits: Tensor, temperature: float, noise: Tensor | None) -> list[int]:
    drafted = logits.isfinite().any(0).nonzero()[:, 0]
    scores = logits[:, drafted].double()
    if noise is not None:
        scores = scores / temperature - noise[:, drafted].log()
    column = torch.searchsorted(drafted, new).clamp(max=len(drafted) - 1)
    own = scores.gather(1, column[:, None])
    can_draft = (drafted[column] == new) & own[:, 0].isfinite()
    ranks: list[int] = torch.where(can_draft, (scores > own).sum(1), MOST_SIBLINGS).tolist()
    return ranks


def rates(answers: Sequence[Ranks]) -> tuple[list[float], list[float]]:
    """Of first children by level, and of further children by rank where the likelier ones were rejected."""
    seen = torch.zeros(MOST_LEVELS, MOST_SIBLINGS, dtype=torch.float64)
    right = torch.zeros_like(seen)
    for answer in answers:
        for start in range(1, len(answer)):
            for level, places in enumerate(answer[start : start + len(answer[start])]):
                rank = places[level]
                seen[level, : rank + 1] += 1
                if rank >= MOST_SIBLINGS:
                    break
                right[level, rank] += 1
    first, siblings = right[:, 0] / seen[:, 0], (right.sum(0) / seen.sum(0))[1:]
    return first.nan_to_num().tolist(), siblings.nan_to_num().tolist()


def best_shapes(answers: Sequence[Ranks], costs: Costs) -> tuple[TreeShape, TreeShape]:
    """-> the best chain and the best tree"""
    first, siblings = rates(answers)
    best: dict[bool, tuple[float, TreeShape]] = {}
    for most_levels in range(1, len(answers[0][0]) + 1):
        parents, chances = best_first(first[:most_levels], siblings, costs.most_nodes)
        chain = TreeShape.chain(most_levels), 1 + sum(torch.tensor(first[:most_levels]).cumprod(0).tolist())
        trees = ((TreeShape(tuple(parents[:n])), 1 + sum(chances[:n])) for n in range(1, len(parents) + 1))
        for shape, num_tokens in (chain, *trees):
            rate = num_tokens / costs.of_step(shape)
            if rate > best.get(shape.is_chain, (0.0, shape))[0]:
                best[shape.is_chain] = rate, shape
    return best[True][1], best[False][1]


def walked(answers: Sequence[Ranks], shape: TreeShape, costs: Costs) -> tuple[float, float]:
    """-> tokens per step, and the speed over plain decoding"""
    num_tokens = num_steps = num_plain = 0
    for answer in answers:
        place = 1  # the pass that reads the prompt writes the first token
        num_plain += 1
        while place < len(answer):
            accepted = len(path_in(answer[place:], shape))
            num_tokens += min(accepted + 1, len(answer) - place)
            num_steps += 1
            place += accepted + 1
    seconds = num_plain + num_steps * costs.of_step(shape)
    return num_tokens / num_steps, (num_plain + num_tokens) / seconds


def path_in(following: Ranks, shape: TreeShape) -> list[int]:
    """The nodes that have the text's next tokens. following: of these tokens"""
    return shape.path(places[level] for level, places in enumerate(following[: shape.depth]))


def report(answers: Sequence[Ranks], temperature: float) -> Iterator[str]:
    for name, costs in CURVES.items():
        chain, tree = best_shapes(answers, costs)
        (chain_tokens, chain_speed), (tree_tokens, tree_speed) = (
            walked(answers, each, costs) for each in (chain, tree)
        )
        yield (
            f"| {name} | {temperature:g} | {len(chain)} | {chain_tokens:.2f} | {chain_speed:.2f} | {tree.depth}, {len(tree)} | "
            f"{tree_tokens:.2f} | {tree_speed:.2f} | {tree_speed / chain_speed:.2f} |"
        )


HEAD = (
    "| costs | temperature | best chain | τ | over plain | best tree: levels, nodes | τ | over plain | tree over chain |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--texts", choices=["chats", "code", "stories"], default="chats")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, args.head, quantization=args.quantization, enable_prefix_caching=False)
    prompts = prompts_of(llm, args.texts, args.questions)
    lines = [HEAD]
    print(HEAD)
    for temperature in args.temperatures:
        answers = list(recorded(llm, prompts, temperature, args.max_tokens))
        for line in report(answers, temperature):
            lines.append(line)
            print(line, flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
