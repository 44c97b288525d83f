"""Errors in a file are reported in one line, and an incomplete recording is read as far as it goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import ForedraftError
from foredraft.trace import read_trace

Lines = list[dict[str, Any]]


def token(token_id: int, **more: Any) -> dict[str, Any]:
    return {"id": token_id, "text": f"<{token_id}>", "p": 0.5, "p_raw": 0.25, **more}


def sound() -> Lines:
    """A valid recording of one text in two steps: the first accepts one of two tokens, the second has no draft."""
    counts = {
        "num_steps": 2, "num_spec_steps": 1, "num_draft_tokens": 2, "num_accepted_tokens": 1,
        "num_evaluated_tokens": 2, "num_emitted_tokens": 3, "acceptance_histogram": [0, 1, 0],
        "drafted_per_position": [1, 1], "evaluated_per_position": [1, 1], "accepted_per_position": [1],
    }  # fmt: skip
    times = {"draft": 0.1, "verify": 0.2, "rest": 0.01, "read": 0.19, "num_rows": 3, "num_texts": 1}
    draft = [token(5, q=1.0, verdict="accepted"), token(6, q=1.0, verdict="rejected")]
    return [
        {"type": "trace", "version": 1, "foredraft": "0.1.0", "created": "2026-01-01T00:00:00+00:00"},
        {"type": "text", "text": 0, "prompt_ids": [1, 2], "prompt": "p"},
        {"type": "step", "step": 0, "start": 0.0, **times},
        {"type": "round", "text": 0, "step": 0, "at": 0, "draft": draft, "own": token(7, origin="recovered")},
        {"type": "step", "step": 1, "start": 0.4, **times},
        {"type": "round", "text": 0, "step": 1, "at": 2, "draft": [], "own": token(8, origin="plain")},
        {"type": "end", "text": 0, "finish_reason": "length", "token_ids": [5, 7, 8], "counts": counts},
        {"type": "close", "num_texts": 1, "num_steps": 2, "counts": counts},
    ]


def written(lines: Lines, folder: Path) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_a_valid_file_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(sound(), tmp_path))
    (text,) = trace.texts
    assert trace.is_complete
    assert text.token_ids == [5, 7, 8]
    assert trace.stats.num_evaluated_tokens == 2


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    lines = sound()
    for line in lines:
        line["novelty"] = {"any": ["thing"]}
    assert read_trace(written(lines, tmp_path)).is_complete


@pytest.mark.parametrize("num_lines", range(1, 8))
def test_an_incomplete_recording_is_read_as_far_as_it_goes(num_lines: int, tmp_path: Path) -> None:
    file = written(sound()[:num_lines], tmp_path)
    for rest in ("", '{"type":"round","tex'):
        file.write_text(file.read_text() + rest)
        trace = read_trace(file)
        assert not trace.is_complete
        assert sum(len(text.rounds) for text in trace.texts) == sum(
            line["type"] == "round" for line in sound()[:num_lines]
        )


FAULTS: dict[str, tuple[Callable[[Lines], object], str]] = {
    "not a header": (lambda lines: lines.pop(0), "not a trace: its first line must be a header"),
    "another version": (
        lambda lines: lines[0].update(version=2),
        "version 2 of the trace format, but this version of foredraft",
    ),
    "no version": (lambda lines: lines[0].pop("version"), "version None"),
    "two headers": (lambda lines: lines.insert(1, lines[0]), "line 2: a second header"),
    "an unknown line": (lambda lines: lines[2].update(type="stride"), "line 3: "),
    "a missing field": (lambda lines: lines[3].pop("own"), "line 4: round.own: Field required"),
    "a probability above 1": (lambda lines: lines[3]["draft"][0].update(p=1.5), "line 4: round.draft.0.p: "),
    "an unknown verdict": (lambda lines: lines[3]["draft"][1].update(verdict="so-so"), "line 4: round.draft.1.verdict"),
    "no number": (lambda lines: lines[2].update(draft="fast"), "line 3: step.draft: "),
    "a step left out": (lambda lines: lines.pop(2), "line 3: a round of step 0 must follow that step's own line"),
    "steps out of order": (lambda lines: lines[4].update(step=2), "line 5: step 2, but step 1 was expected"),
    "a text twice": (lambda lines: lines.insert(2, lines[1]), "line 3: text 0 has already begun"),
    "an unknown text": (lambda lines: lines[3].update(text=4), "line 4: text 4 has not begun"),
    "a round too late": (lambda lines: lines.insert(7, {**lines[5], "at": 3}), "line 8: text 0 has already ended"),
    "a gap": (lambda lines: lines[5].update(at=3), "line 6: text 0 has 2 tokens, but this round begins at 3"),
    "other tokens": (lambda lines: lines[6].update(token_ids=[5, 7, 9]), "line 7: the rounds of text 0 do not produce"),
    "other counts": (
        lambda lines: lines[6]["counts"].update(num_accepted_tokens=2),
        "line 7: num_accepted_tokens is 2, but the rounds of text 0 have 1",
    ),
    "a text without end": (lambda lines: lines.pop(6), "line 7: text 0 has no end"),
    "other totals": (lambda lines: lines[7].update(num_steps=3), "line 8: it counts 1 texts and 3 steps"),
    "a line after the last": (lambda lines: lines.append(lines[1]), "line 9: nothing may follow the closing line"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_are_reported_in_one_line(fault: str, tmp_path: Path) -> None:
    lines = sound()
    change, expected = FAULTS[fault]
    change(lines)
    lines = json.loads(json.dumps(lines))
    with pytest.raises(ForedraftError) as caught:
        read_trace(written(lines, tmp_path))
    assert expected in str(caught.value)
    assert "trace.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"hello\n", b"\xff\xfe\n", b"[1]\n", b'{"type": "trace"'], ids=str)
def test_files_that_are_no_trace_are_refused(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(raw)
    with pytest.raises(ForedraftError, match="not a trace"):
        read_trace(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nothing.jsonl")
