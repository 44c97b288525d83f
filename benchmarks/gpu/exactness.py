"""Whether greedy texts on the GPU are those of the processor in float32, and in batch-invariant mode those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.decoding import clear
from benchmarks.gpu.device import DEVICE, DTYPE
from benchmarks.gpu.size import Size
from benchmarks.gpu.speculation import GAMMA, Widening, greedy
from foredraft import LLM, SamplingParams
from foredraft.model import EMBEDDED, Read

Texts = list[Sequence[int]]


def against_the_processor(prompts: Sequence[str], size: Size) -> dict[str, Any]:
    """Greedy texts of the embedded pair on the device, in float32 and bfloat16, with drafts and without, against plain decoding in
    float32 on the processor. Where a text differs: the processor's gap between the two logits at the first different token."""
    params = greedy(size)
    here = LLM(EMBEDDED / "target", method="none", device="cpu", dtype="float32")
    expected = texts_of(here, prompts, params)
    result: dict[str, Any] = {}
    for dtype in dict.fromkeys(("float32", str(DTYPE).removeprefix("torch."))):
        llm = LLM(
            EMBEDDED / "target",
            EMBEDDED / "draft",
            device=DEVICE,
            dtype=dtype,
            speculative_tokens=GAMMA,
            max_num_seqs=8,
        )
        for name, one in (("plain", llm.with_drafter("none")), ("drafting", llm)):
            texts = texts_of(one, prompts, params)
            ids = here.text_tokenizer(list(prompts)).input_ids
            gaps = [gap(here, *each) for each in zip(ids, expected, texts, strict=True) if each[1] != each[2]]
            result[f"{dtype} {name}"] = {"of": len(texts), "differ": len(gaps), "gaps": sorted(gaps)}
    return result


def texts_of(llm: LLM, prompts: Sequence[str], params: SamplingParams, at_once: int = 8) -> Texts:
    groups = [list(prompts[first : first + at_once]) for first in range(0, len(prompts), at_once)]
    return [output.outputs[0].token_ids for group in groups for output in llm.generate(group, params)]


def gap(llm: LLM, prompt: Sequence[int], expected: Sequence[int], other: Sequence[int]) -> float:
    """How much more likely than the other text's token, in logits, the model finds its own at the first different token."""
    place = next(i for i, (a, b) in enumerate(zip(expected, other, strict=True)) if a != b)
    ids = [*prompt, *expected[:place]]
    logits = llm.target.read([Read(0, ids, 1)], llm.target.scratch_cache([len(ids)]))[0]
    return float(logits[expected[place]] - logits[other[place]])


def invariance(models: Widening, prompts: Sequence[str], size: Size) -> dict[str, Any]:
    """The number of greedy texts, and of seeded ones, that are the same with drafts, one and eight at a time, as without, one at a time."""
    models.wait()
    result: dict[str, Any] = {}
    for is_invariant in (True, False):
        llm = LLM(
            models.target,
            models.draft,
            device=DEVICE,
            dtype=DTYPE,
            speculative_tokens=GAMMA,
            max_num_seqs=8,
            batch_invariant=is_invariant,
        )
        plain = llm.with_drafter("none")
        name = "batch_invariant" if is_invariant else "default"
        result[name] = {"row_exact": llm.target.traits.row_exact, "of": len(prompts)}
        for kind, params in (
            ("greedy", greedy(size)),
            ("seeded", replace(greedy(size), temperature=0.8, seed=7)),
        ):
            expected = texts_of(plain, prompts, params, 1)
            for batch in (1, 8):
                texts = texts_of(llm, prompts, params, batch)
                same = sum(a == b for a, b in zip(texts, expected, strict=True))
                result[name][f"{kind}, batch {batch}"] = same
            if not is_invariant:
                break
        del llm, plain
        clear()
    return result


def table(result: dict[str, Any]) -> list[str]:
    """A summary, line by line."""
    lines = []
    for name, one in result.get("against_the_processor", {}).items():
        if isinstance(one, dict):
            most = max(one["gaps"], default=0.0)
            lines.append(
                f"texts against float32 on the processor, {name}: {one['differ']} of {one['of']} differ, gaps of at most {most:.2g}"
            )
    lines += [f"the same texts as plain decoding, {name}: {one}" for name, one in result.get("invariance", {}).items()]
    return lines
