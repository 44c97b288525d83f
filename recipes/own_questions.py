"""Questions that a chat model asks itself, so that a head can be trained on its answers.

    python recipes/own_questions.py TARGET NUMBER [SEED] > questions.jsonl

TARGET continues its template's opening of a user's turn NUMBER times. Prints one object with "text" per line. Repetitions are left out,
and so are questions that do not end within 120 tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from foredraft.llm import LLM
from foredraft.train.chats import QuestionWriter
from foredraft.train.generations import BATCH_SIZE, writing_llm

MAX_TOKENS, MIN_CHARACTERS = 120, 10


def own_questions(llm: LLM, number: int, seed: int) -> Iterator[str]:
    """Distinct questions, at most this many."""
    assert llm.tokenizer is not None
    writer = QuestionWriter(llm, MAX_TOKENS, seed)
    seen: set[str] = set()
    for start in range(0, number, 2 * BATCH_SIZE):
        for ids, is_complete in writer.write(range(start, min(start + 2 * BATCH_SIZE, number))):
            text = str(llm.tokenizer.decode(ids, skip_special_tokens=True)).strip()
            if is_complete and len(text) >= MIN_CHARACTERS and text not in seen:
                seen.add(text)
                yield text


def main() -> None:
    target, number, *seed = sys.argv[1:]
    for text in own_questions(writing_llm(target), int(number), int(seed[0]) if seed else 0):
        print(json.dumps({"text": text}), flush=True)


if __name__ == "__main__":
    main()
