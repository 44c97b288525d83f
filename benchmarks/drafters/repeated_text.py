"""How often a head agrees with a chat model where a text repeats itself, and elsewhere.

    python -m benchmarks.drafters.repeated_text HEAD --model MODEL [--questions 80] [--questions-file FILE] [--max-tokens 128]
        [--depth 5]

The model answers the first turns of MT-bench's questions greedily. FILE: other questions, see chat_acceptance. A token is "repeated"
if the last MATCH tokens before it occurred earlier in the text, and the token after their last occurrence is the same; it is "broken
off" if that token is another one. The head drafts at every position, with the text's own tokens before each draft token (teacher
forcing), so the shares are higher than those of drafts, which begin where the last one was wrong.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.prompts import question_ids, questions_of
from foredraft import LLM, SamplingParams
from foredraft.train.head_acceptance import HeadOnTexts

MATCH = 4
KINDS = ("repeated", "broken off", "new")


def kind_of(ids: Sequence[int], place: int, last_places: dict[tuple[int, ...], int]) -> str:
    """last_places: for each sequence of MATCH tokens, the last place before this one that it precedes."""
    before = last_places.get(tuple(ids[place - MATCH : place]))
    if before is None:
        return "new"
    return "repeated" if ids[before] == ids[place] else "broken off"


def kinds_of(ids: Sequence[int]) -> list[str]:
    """The kind of every token; those at the beginning are new."""
    last_places: dict[tuple[int, ...], int] = {}
    kinds = ["new"] * min(MATCH, len(ids))
    for place in range(MATCH, len(ids)):
        kinds.append(kind_of(ids, place, last_places))
        last_places[tuple(ids[place - MATCH : place])] = place
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--questions-file", type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, args.head, method="eagle", seed=0)
    head = HeadOnTexts(llm)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    total: Counter[tuple[int, str]] = Counter()
    agreed: Counter[tuple[int, str]] = Counter()
    prompts = question_ids(llm.text_tokenizer, questions_of(args.questions_file, args.questions))
    for output in llm.generate(prompts, params):
        num_given = len(output.prompt_token_ids)
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        kinds = kinds_of(ids)
        for depth, logits in enumerate(head.logits(ids, args.depth)):
            for place, drafted in enumerate(logits.argmax(-1).tolist()):
                if place > num_given + depth:
                    total[depth, kinds[place]] += 1
                    agreed[depth, kinds[place]] += drafted == ids[place]
    print("| place in the draft |", " | ".join(KINDS), "|")
    print("|---" * (len(KINDS) + 1), "|", sep="")
    for depth in range(args.depth):
        shares = [f"{agreed[depth, kind] / total[depth, kind]:.2f}" for kind in KINDS if total[depth, kind]]
        print(f"| {depth + 1} |", " | ".join(shares), "|")
    number = sum(total[0, kind] for kind in KINDS)
    print("| share of the tokens |", " | ".join(f"{total[0, kind] / number:.2f}" for kind in KINDS), "|")


if __name__ == "__main__":
    main()
