"""How often a tree node has a child that the target accepts, by how children are chosen, on real distributions p and q.

    python -m benchmarks.drafters.sibling_acceptance [--target DIR --draft DIR] [--temperatures 0.8 1.0] [--texts 15]
        [--max-tokens 64] [--draws 8] [--out FILE.md]

The target writes texts at the temperature. At each position both models give their distributions (p: the target's, q: the draft's), and
children are chosen and verified --draws times; the texts themselves are written without drafts. Rules: `p/q` accepts one token of q (its
acceptance is the sum of the smaller probabilities). Shared noise takes the k best of log q plus the noise with which the target draws
its own token. Rejection without replacement draws k different tokens of q and accepts each by p/q, where p and q are what is left of
them (recursive rejection sampling, arXiv:2402.14160). Top k takes the k likeliest of q. With shared noise and top k, a child is accepted
if it is the target's own token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.prompts import code_prompts, story_prompts
from foredraft import LLM, SamplingParams
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.verify.without_replacement import siblings_law

SIBLINGS = (1, 2, 4)
_TINY = 1e-30


def distributions(model: LanguageModel, texts: Sequence[tuple[list[int], int]], temperature: float) -> Tensor:
    """texts: tokens, and how many of them are the prompt -> [positions, V], the distributions after every token from the prompt's last to
    the text's last but one
    """
    rows = []
    for tokens, prompt_len in texts:
        cache = model.scratch_cache([len(tokens)])
        logits = model.read([Read(0, tokens[:-1], len(tokens) - prompt_len)], cache)
        rows.append((logits.float() / temperature).softmax(-1))
    return torch.cat(rows)


def gumbel_like(x: Tensor) -> Tensor:
    return -torch.empty_like(x).exponential_().log()


def ratio(p: Tensor, q: Tensor) -> float:
    return float(torch.minimum(p, q).sum(-1).mean())


def shared_noise(p: Tensor, q: Tensor, k: int) -> float:
    noise = gumbel_like(p)
    own = (p.log() + noise).argmax(-1, keepdim=True)
    return float((own == (q.log() + noise).topk(k, -1).indices).any(-1).float().mean())


def top_k(p: Tensor, q: Tensor, k: int) -> float:
    return float(p.gather(1, q.topk(k, -1).indices).sum(-1).mean())


def rejection(p: Tensor, q: Tensor, k: int) -> float:
    """Acceptance of rejection without replacement."""
    drawn = q.clamp(min=_TINY).multinomial(k)
    return float(siblings_law(p, q, drawn)[0].sum(-1).mean())


def mean(rule: Callable[[Tensor, Tensor, int], float], p: Tensor, q: Tensor, k: int, draws: int) -> float:
    return sum(rule(p, q, k) for _ in range(draws)) / draws


def row(name: str, p: Tensor, q: Tensor, draws: int) -> str:
    noise = " / ".join(f"{mean(shared_noise, p, q, k, draws):.3f}" for k in SIBLINGS)
    replaced = " / ".join(f"{mean(rejection, p, q, k, draws):.3f}" for k in SIBLINGS[1:])
    likeliest = " / ".join(f"{top_k(p, q, k):.3f}" for k in SIBLINGS)
    return f"| {name} | {len(p)} | {ratio(p, q):.3f} | {noise} | {replaced} | {likeliest} |"


HEAD = (
    "| texts | places | p/q, one draft | shared noise, k = 1 / 2 / 4 | rejection without replacement, k = 2 / 4 "
    "| top k, k = 1 / 2 / 4 |\n|---|---|---|---|---|---|"
)


def written_texts(llm: LLM, prompts: list[str], temperature: float, max_tokens: int) -> list[tuple[list[int], int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=1.0, top_k=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    return [(output.prompt_token_ids + output.outputs[0].token_ids, len(output.prompt_token_ids)) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED / "target", type=Path)
    parser.add_argument("--draft", default=EMBEDDED / "draft", type=Path)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--texts", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    llm = LLM(args.target, method="none", seed=0)
    draft = load_model(args.draft, LoadOptions())
    lines = [HEAD]
    for temperature in args.temperatures:
        for name, prompts in (("stories", story_prompts(args.texts)), ("code", code_prompts(args.texts))):
            texts = written_texts(llm, prompts, temperature, args.max_tokens)
            p, q = (distributions(model, texts, temperature) for model in (llm.target, draft))
            lines.append(row(f"{name}, T {temperature:g}", p, q, args.draws))
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
