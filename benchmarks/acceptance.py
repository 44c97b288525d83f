"""What the model-free drafters would earn on a text, without running a model: teacher-forced τ.

    python benchmarks/acceptance.py TEXT [--split LINE_START] [--speculative-tokens 4] [--max-tokens 2048] [--prompt 0]

The text stands for what a target writes: at each step a drafter sees the text so far and drafts, the draft tokens up to
the first wrong one are accepted, and the text's own next token follows. τ is tokens per step, steps without a draft
included. It asks how well a drafter guesses *this* text, not how fast anything runs. TEXT may be gzipped. The file is
cut into documents (before each line that begins with --split, else at <|endoftext|>), each is one request.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from foredraft.demo import repeated_share
from foredraft.drafters import NgramDrafter, SuffixDrafter
from foredraft.model import EMBEDDED
from foredraft.proposal import Drafter, DraftRequest
from foredraft.sampling import Sampler, SamplingParams
from foredraft.stats import SpeculationStats

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram(3..1)": lambda: NgramDrafter(3, 1),
    "ngram(3..2)": lambda: NgramDrafter(3, 2),
    "suffix": SuffixDrafter,
    "suffix+corpus(100k)": lambda: SuffixDrafter(corpus_tokens=100_000),
}


def documents_of(path: Path, line_start: str | None) -> list[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    if line_start is None:
        found = text.split("<|endoftext|>")
    else:
        found = [""]
        for line in text.splitlines(keepends=True):
            if line.startswith(line_start):
                found.append("")
            else:
                found[-1] += line
    return [document.strip() for document in found if document.strip()]


def teacher_forced(
    drafter: Drafter, documents: Sequence[Sequence[int]], gamma: int, num_prompt: int
) -> SpeculationStats:
    """The first num_prompt tokens of a document (at least one) are its prompt. One document after the other."""
    stats = SpeculationStats()
    greedy = SamplingParams(temperature=0.0).resolve({})
    for seq_id, document in enumerate(documents):
        history = list(document[: max(1, num_prompt)])
        sampler = Sampler(greedy, history, torch.Generator())
        while len(history) < len(document):
            # the last token of a text is the target's own
            max_len = min(gamma, len(document) - len(history) - 1)
            proposal = drafter.propose([DraftRequest(seq_id, history, max_len, sampler)])
            draft = proposal.ids[0, : proposal.lens[0]].tolist()
            truth = document[len(history) : len(history) + len(draft)]
            pairs = enumerate(zip(draft, truth, strict=True))
            num_accepted = next((i for i, (ours, theirs) in pairs if ours != theirs), len(draft))
            stats.record(num_drafted=len(draft), num_accepted=num_accepted, num_kept=num_accepted + 1)
            history.extend(document[len(history) : len(history) + num_accepted + 1])
        drafter.forget([seq_id])
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--split", help="a line that begins with this starts a new document, and is dropped")
    parser.add_argument("--speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of each document; the rest is not read")
    parser.add_argument("--max-documents", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=0, help="this many first tokens of a document are its prompt")
    parser.add_argument("--tokenizer", default=str(EMBEDDED / "target"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    texts = documents_of(args.text, args.split)[: args.max_documents]
    documents = [tokenizer(text)["input_ids"][: args.max_tokens] for text in texts]
    num_tokens = sum(map(len, documents))
    looping = sum(repeated_share(document) * len(document) for document in documents) / num_tokens
    report: dict[str, object] = {
        "text": args.text.name,
        "num_documents": len(documents),
        "num_tokens": num_tokens,
        "speculative_tokens": args.speculative_tokens,
        "repeated_share": looping,
    }
    results = {
        name: teacher_forced(make(), documents, args.speculative_tokens, args.prompt)
        for name, make in DRAFTERS.items()
    }
    if args.json:
        rows = {
            name: {"tau": s.tokens_per_pass, "alpha": s.conditional_acceptance, "drafted_per_step": _per_step(s)}
            for name, s in results.items()
        }
        print(json.dumps(report | {"drafters": rows}))
        return
    print(f"{args.text.name}: {num_tokens} tokens in {len(documents)} documents, γ = {args.speculative_tokens}, "
          f"{looping:.0%} of the tokens in repeated 8-grams")
    print(f"{'drafter':22}{'τ':>6}{'α':>7}{'drafted per step':>19}")
    for name, stats in results.items():
        alpha = stats.conditional_acceptance or 0.0
        print(f"{name:22}{stats.tokens_per_pass or 0.0:6.2f}{alpha:7.2f}{_per_step(stats):19.2f}")


def _per_step(stats: SpeculationStats) -> float:
    return stats.num_draft_tokens / stats.num_steps if stats.num_steps else 0.0


if __name__ == "__main__":
    main()
