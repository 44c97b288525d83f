"""What the model-free drafters would gain on a text, without running a model: teacher-forced τ.

    python -m benchmarks.drafters.teacher_forced_acceptance TEXT [--split LINE_START] [--speculative-tokens 4] [--max-tokens 2048]

The text takes the place of the target's output: at each step a drafter drafts from the text so far, the draft tokens up
to the first wrong one are accepted, and the text's own next token follows. τ is tokens per step, including steps without
a draft. It shows how well a drafter predicts this text, and says nothing about time. TEXT may be gzipped. It is cut into
documents before each line that begins with --split, or else at <|endoftext|>; each is one request without a prompt.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from foredraft.bench.figures import repeated_share
from foredraft.drafters import NgramDrafter, SuffixDrafter
from foredraft.engine.proposal import Drafter, DraftRequest
from foredraft.engine.stats import SpeculationStats
from foredraft.model import EMBEDDED
from foredraft.sampling import Sampler, SamplingParams

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
        result = text.split("<|endoftext|>")
    else:
        result = [""]
        for line in text.splitlines(keepends=True):
            if line.startswith(line_start):
                result.append("")
            else:
                result[-1] += line
    return [document.strip() for document in result if document.strip()]


def teacher_forced(drafter: Drafter, documents: Sequence[Sequence[int]], gamma: int) -> SpeculationStats:
    """Statistics over the documents, each read from its first token."""
    stats = SpeculationStats()
    greedy = SamplingParams(temperature=0.0).resolve({})
    for seq_id, document in enumerate(documents):
        history = list(document[:1])
        sampler = Sampler(greedy, history, torch.Generator())
        while len(history) < len(document):
            rest = document[len(history) :]
            # the last token of a text is always the target's own
            request = DraftRequest(seq_id, history, min(gamma, len(rest) - 1), sampler)
            proposal = drafter.propose([request])
            draft = proposal.ids[0, : proposal.lens[0]].tolist()
            wrong = (i for i, token in enumerate(draft) if token != rest[i])
            num_accepted = next(wrong, len(draft))
            stats.record(num_drafted=len(draft), num_accepted=num_accepted, num_kept=num_accepted + 1)
            history.extend(rest[: num_accepted + 1])
        drafter.forget([seq_id])
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--split", help="lines that begin with this start a new document and are dropped")
    parser.add_argument("--speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens to read of each document")
    parser.add_argument("--tokenizer", default=str(EMBEDDED / "target"))
    args = parser.parse_args()

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    texts = documents_of(args.text, args.split)
    documents = [tokenizer(text)["input_ids"][: args.max_tokens] for text in texts]
    num_tokens = sum(map(len, documents))
    repeated = sum(repeated_share(document) * len(document) for document in documents) / num_tokens
    print(
        f"{args.text.name}: {num_tokens} tokens in {len(documents)} documents, γ = {args.speculative_tokens}, "
        f"{repeated:.0%} of the tokens in repeated 8-grams"
    )
    print(f"{'drafter':22}{'τ':>6}{'α':>7}{'drafted per step':>19}")
    for name, make in DRAFTERS.items():
        stats = teacher_forced(make(), documents, args.speculative_tokens)
        alpha, per_step = stats.conditional_acceptance or 0.0, stats.num_draft_tokens / stats.num_steps
        print(f"{name:22}{stats.tokens_per_pass or 0.0:6.2f}{alpha:7.2f}{per_step:19.2f}")


if __name__ == "__main__":
    main()
