"""Between text and token ids: prompts in, text out as it is written, and the strings that end it.

Everything here is behind the engine's back: it hands a sequence a stop rule (`TextStream`, a function from new ids to
how many of them to keep) and never sees a character itself.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.sampling.params import SamplingParams

REPLACEMENT: Final = "\ufffd"

_TEXT, _IGNORED = -1, -2  # kinds of token; 0..255 is a byte token of that value
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_CONTEXT = 8  # tokens before the new one that are decoded with it: enough for any character and any joint
_MAX_CONTEXT = 128  # where the context cannot be cut (see _slide), the most that is decoded again per token
_MAX_HELD_BYTES = 64  # byte tokens held back until their run ends
_MAX_PENDING = 3  # bytes of an unfinished UTF-8 character, each of which some decoders show as a U+FFFD
_CLEAN_UP_REACH = 8  # how far back clean_up_tokenization (" 've" -> "'ve", one rule after another) can change text


class _Vocabulary:
    """What one tokenizer does with each token when it decodes; learnt by asking it, remembered for all sequences."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self.skip_special_tokens = skip_special_tokens
        self.kinds: dict[int, int] = {}
        self.blanks_byte_runs = _blanks_byte_runs(tokenizer)
        self.unsettled = _CLEAN_UP_REACH if _cleans_up(tokenizer) else 0
        self.context = _CONTEXT + 2 * self.unsettled

    def kind(self, tokenizer: PreTrainedTokenizerBase, token_id: int) -> int:
        kind = self.kinds.get(token_id)
        if kind is None:
            kind = self.kinds[token_id] = self._ask(tokenizer, token_id)
        return kind

    def _ask(self, tokenizer: PreTrainedTokenizerBase, token_id: int) -> int:
        token = _token(tokenizer, token_id)
        if token is None:
            return _IGNORED
        byte = _BYTE_TOKEN.fullmatch(token) if self.blanks_byte_runs else None
        if byte:
            return int(byte[1], 16)
        shown, skipped = (tokenizer.decode([token_id], skip_special_tokens=skip) for skip in (False, True))
        return _IGNORED if self.skip_special_tokens and shown and not skipped else _TEXT


_VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, _Vocabulary]] = WeakKeyDictionary()


def _vocabulary(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> _Vocabulary:
    known = _VOCABULARIES.setdefault(tokenizer, {})
    if skip_special_tokens not in known:
        known[skip_special_tokens] = _Vocabulary(tokenizer, skip_special_tokens)
    return known[skip_special_tokens]


def _token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """The token behind an id; None for one past the vocabulary (a model's logits are often padded)."""
    try:
        return cast("str | None", tokenizer.convert_ids_to_tokens(token_id))
    except (IndexError, KeyError, OverflowError):
        return None


def _blanks_byte_runs(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether one bad byte turns a whole run of byte tokens into U+FFFD, good characters included (byte fallback)."""
    tokens = ["<0x41>", "<0xFF>"]
    ids = [cast("int | None", tokenizer.convert_tokens_to_ids(token)) for token in tokens]
    if any(i is None or _token(tokenizer, i) != token for i, token in zip(ids, tokens, strict=True)):
        return False
    return bool(tokenizer.decode(cast("list[int]", ids)) == 2 * REPLACEMENT)


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decode() removes spaces before punctuation from the whole text; transformers spares BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "BPE":
        return True
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))


class IncrementalDecoder:
    """Token ids in, text out as soon as it can no longer change.

    The pieces that push, extend and flush return, joined, are `decode(prompt_ids + output)` from the first character
    on in which it differs from `decode(prompt_ids)`; for a byte-level tokenizer after whole characters that is
    `decode(output)`. Two bounds are the exceptions: see `_ByteRun` and `_slide`.

    How: each token is decoded with the few before it (the window), and what is new is the text behind the cursor. The
    first _CONTEXT tokens of a window have been read before: they are there because a token's text depends on its
    neighbours (leading spaces, word pieces, characters over several tokens). Held back are an unfinished character, a
    run of byte tokens, and the reach of clean_up_tokenization. O(1) per token, whatever the model writes.
    """

    __slots__ = ("_cursor", "_prompt_rest", "_run", "_text", "_tokenizer", "_vocabulary", "_window")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary(tokenizer, skip_special_tokens)
        self._window: list[int] = []
        self._text = ""  # of the window
        self._cursor = 0  # characters of it that were given out
        self._run: _ByteRun | None = None
        self._extend(self._prompt_tail(prompt_ids, self._vocabulary.context))
        if not self._text.strip() and self._run is None:
            # Some decoders strip white space at the ends: look further back for something that stops them.
            self._window, self._text, self._cursor = [], "", 0
            self._extend(self._prompt_tail(prompt_ids, _MAX_CONTEXT // 2))
        # The prompt may end in what is held back: the output begins where the text departs from this.
        self._prompt_rest = self._rest()

    def push(self, token_id: int) -> str:
        """Takes the next token; the text that is final now (often one token's, sometimes none)."""
        return self._after_prompt(self._push(token_id))

    def extend(self, token_ids: Sequence[int]) -> str:
        """As push for each in turn, but decodes once where it can."""
        return self._after_prompt(self._extend(token_ids))

    def is_append_only(self, token_ids: Sequence[int]) -> bool:
        """Whether push of each of these would only ever add to text and tail, so that they may be read at once."""
        return not self._vocabulary.unsettled and all(self._kind(token_id) < 0 for token_id in token_ids)

    def flush(self) -> str:
        """The rest of the text once no token follows, as the tokenizer shows it; "" when asked again."""
        rest = self._after_prompt(self._rest())
        self._window, self._text, self._cursor, self._run = [], "", 0, None
        return rest

    @property
    def tail(self) -> str:
        """Whole characters that stand behind what was given out if the text ends here, but may yet change."""
        tail = self._whole_characters()
        return tail[_num_shared(tail, self._prompt_rest) :] if self._prompt_rest else tail

    def clone(self) -> IncrementalDecoder:
        """An independent decoder in the same state."""
        twin = copy.copy(self)
        twin._window = self._window.copy()
        twin._run = copy.deepcopy(self._run)
        return twin

    def _push(self, token_id: int) -> str:
        kind = self._kind(token_id)
        if kind == _TEXT:
            return self._read([token_id])
        return "" if kind == _IGNORED else self._read_byte(token_id, kind)

    def _extend(self, token_ids: Sequence[int]) -> str:
        if not self.is_append_only(token_ids):
            return "".join([self._push(token_id) for token_id in token_ids])
        return self._read([token_id for token_id in token_ids if self._kind(token_id) != _IGNORED])

    def _read(self, token_ids: list[int]) -> str:
        """Appends tokens that are not bytes, none of them ignored."""
        piece = ""
        if not token_ids:
            return piece
        if self._run is not None:
            piece = self._run.end() if self._run.is_decided else ""
            self._run = None
        self._window += token_ids
        self._text = self._decode(self._window)
        piece += self._release(min(_without_pending(self._text), len(self._text) - self._vocabulary.unsettled))
        if len(self._window) > 2 * self._vocabulary.context:
            self._slide()
        return piece

    def _read_byte(self, token_id: int, byte: int) -> str:
        if self._run is None:
            self._run = _ByteRun(len(self._window))
        if self._run.is_decided:
            return self._run.read(byte)
        self._window.append(token_id)
        if not self._run.is_good(byte):
            return self._blank(self._run)
        return self._wait_no_longer(self._run) if self._run.is_too_long else ""

    def _blank(self, run: _ByteRun) -> str:
        run.decide(is_blank=True)
        self._text = self._decode(self._window)
        return self._release(len(self._text))

    def _wait_no_longer(self, run: _ByteRun) -> str:
        """Gives out the run's characters; its first byte stays in the window, as context."""
        piece = self._whole_characters()
        del self._window[run.begin + 1 :]
        self._text = self._decode(self._window)
        self._cursor = len(self._text)
        run.decide(is_blank=False)
        return piece

    def _whole_characters(self) -> str:
        """The text behind the cursor as of now, without an unfinished character."""
        if self._run is None:
            return self._text[self._cursor : _without_pending(self._text)]
        if self._run.is_decided:
            return ""
        whole = self._window[: len(self._window) - len(self._run.pending)]
        return self._decode(whole)[self._cursor :]

    def _release(self, end: int) -> str:
        begin, self._cursor = self._cursor, max(self._cursor, end)
        return self._text[begin : self._cursor]

    def _slide(self) -> None:
        """Forgets the old part of the window, where what remains decodes to the same text at its end.

        It does not where decode() strips white space and all that remains is white space, for one. Such a window
        grows, to _MAX_CONTEXT: of more white space than that, under such a decoder, some is lost.
        """
        window = self._window[-self._vocabulary.context :]
        text = self._decode(window)
        num_waiting = len(self._text) - self._cursor
        must_agree = num_waiting + 1
        agrees = len(text) >= must_agree and text[-must_agree:] == self._text[-must_agree:]
        if agrees or len(self._window) > _MAX_CONTEXT:
            self._window, self._text, self._cursor = window, text, max(0, len(text) - num_waiting)

    def _rest(self) -> str:
        if self._run is None:
            return self._text[self._cursor :]
        return self._run.end() if self._run.is_decided else self._decode(self._window)[self._cursor :]

    def _after_prompt(self, piece: str) -> str:
        if not self._prompt_rest or not piece:
            return piece
        num_shared = _num_shared(piece, self._prompt_rest)
        self._prompt_rest = self._prompt_rest[num_shared:] if num_shared == len(piece) else ""
        return piece[num_shared:]

    def _prompt_tail(self, prompt_ids: Sequence[int], size: int) -> list[int]:
        """The end of the prompt, not to begin inside a run of byte tokens (half of one may decode to other text)."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._kind(token_id) == _IGNORED:
                continue
            if len(tail) >= size and (self._kind(tail[-1]) < 0 or len(tail) >= _MAX_CONTEXT):
                break
            tail.append(token_id)
        if len(tail) >= _MAX_CONTEXT:
            while tail and 0x80 <= self._kind(tail[-1]) < 0xC0:
                tail.pop()  # continuation bytes of a character whose beginning was left behind
        return tail[::-1]

    def _kind(self, token_id: int) -> int:
        return self._vocabulary.kind(self._tokenizer, token_id)

    def _decode(self, token_ids: list[int]) -> str:
        skip = self._vocabulary.skip_special_tokens
        return cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=skip))


class _ByteRun:
    """Consecutive byte tokens of a byte-fallback vocabulary (Llama 2, Gemma, ...).

    The tokenizer decodes such a run as a whole: one U+FFFD per byte, whole characters included, if any byte of it is
    bad. So its text is held back until the run ends or breaks. In a run of more than _MAX_HELD_BYTES good bytes
    characters are given out as they complete, and stay if a later byte is bad: the one place where the text is not
    what decode() of all ids gives.
    """

    __slots__ = ("_is_blank", "_num_bytes", "_reader", "begin", "is_decided")

    def __init__(self, begin: int) -> None:
        self.begin = begin  # in the decoder's window
        self.is_decided = False  # blank, or too long to wait: what follows no longer changes what was read
        self._is_blank = False
        self._num_bytes = 0
        self._reader = codecs.getincrementaldecoder("utf-8")()

    @property
    def pending(self) -> bytes:
        """The end that does not make a character yet."""
        return b"" if self._is_blank else self._reader.getstate()[0]

    @property
    def is_too_long(self) -> bool:
        return self._num_bytes > _MAX_HELD_BYTES

    def is_good(self, byte: int) -> bool:
        """Whether the run with this byte may still decode to characters."""
        self._num_bytes += 1
        try:
            self._reader.decode(bytes([byte]))
        except UnicodeDecodeError:
            return False
        return True

    def decide(self, *, is_blank: bool) -> None:
        self.is_decided, self._is_blank = True, is_blank
        self._reader.errors = "replace"

    def read(self, byte: int) -> str:
        """The text of one more byte, in a run that is decided."""
        return REPLACEMENT if self._is_blank else self._reader.decode(bytes([byte]))

    def end(self) -> str:
        """The text of what is pending in a run that is decided."""
        return self.pending.decode(errors="replace")


def _without_pending(text: str) -> int:
    """The length of text without the U+FFFD at its end that further bytes may turn into a character."""
    end, floor = len(text), max(0, len(text) - _MAX_PENDING)
    while end > floor and text[end - 1] == REPLACEMENT:
        end -= 1
    return end


def _num_shared(a: str, b: str) -> int:
    """The length of the longest common prefix."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TextStream:
    """The text of one sequence, and its stop rule: the engine calls it, the caller reads it.

    stop: strings that end the text. The one that completes first ends it: at the earliest token, within that token
        the one that begins first, of several there the shortest. One that completes among the first min_tokens
        output tokens is ignored.
    include_stop_str_in_output: the text ends after the stop string instead of before it.

    `stop_reason` is the string that ended the text, or None.
    """

    __slots__ = (
        "_any_stop",
        "_decoder",
        "_held",
        "_include_stop",
        "_is_finished",
        "_min_tokens",
        "_num_streamed",
        "_num_taken",
        "_pieces",
        "_reach",
        "_recent",
        "_stop",
        "_tail",
        "_unread",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop_reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._stop = tuple(sorted(set(stop), key=len))
        self._any_stop = re.compile("|".join(map(re.escape, self._stop)))
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._is_finished = False
        self._unread: list[int] = []  # taken, and not decoded until somebody looks: where nothing can stop the text
        self._pieces: list[str] = []  # the text, all of it final
        self._reach = max(map(len, self._stop), default=1) - 1
        self._recent = ""  # the last _reach characters of the text
        self._tail = ""  # the decoder's, after the last token
        self._num_taken = 0  # pieces that delta has seen,
        self._held = ""  # what it held back of them,
        self._num_streamed = 0  # and the characters it gave out

    @classmethod
    def for_request(
        cls, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], params: SamplingParams
    ) -> TextStream:
        """The stream of one text of a request."""
        return cls(
            tokenizer,
            prompt_ids=prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def __call__(self, new_ids: Sequence[int], num_output_before: int) -> int | None:
        """The stop rule: None to go on, or how many of the ids to keep, the last of which completed a stop string.

        new_ids follow the num_output_before ids that were handed in before. After a stop nothing is kept.
        """
        if self._is_finished:
            return 0
        if not self._stop:
            self._unread.extend(new_ids)
            return None
        if len(new_ids) > 1 and self._pass_over(new_ids):
            return None
        for i, token_id in enumerate(new_ids):
            piece = self._decoder.push(token_id)
            if self._complete(piece, is_checked=num_output_before + i >= self._min_tokens):
                return i + 1
        return None

    @property
    def text(self) -> str:
        """The text so far, whole characters only; all of it once it is finished or a stop string has ended it."""
        self._catch_up()
        return "".join(self._pieces)

    def delta(self, finished: bool = False) -> str:
        """The text since the last call, less an end that might become a stop string; all of it when finished."""
        if finished:
            self.finish()
        self._catch_up()
        new = self._held + "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        release = len(new) - self._num_ambiguous(new)
        self._held = new[release:]
        self._num_streamed += release
        return new[:release]

    def finish(self) -> str:
        """Ends the text, for whatever reason the engine had; the whole of it."""
        if not self._is_finished:
            self._catch_up()
            self._append(self._decoder.flush())
            self._is_finished = True
        return self.text

    def _catch_up(self) -> None:
        if self._unread:
            unread, self._unread = self._unread, []
            self._append(self._decoder.extend(unread))

    def _append(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def _num_ambiguous(self, text: str) -> int:
        """How much of the end of text may be the beginning of a stop string that is to be cut off."""
        if self._is_finished or self._include_stop:
            return 0
        for length in range(min(self._reach, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def _pass_over(self, new_ids: Sequence[int]) -> bool:
        """Reads a whole block at once, unless a stop string completes in it: then nothing has happened."""
        if not self._decoder.is_append_only(new_ids):
            return False
        before = self._decoder.clone()
        piece = self._decoder.extend(new_ids)
        tail = self._decoder.tail
        if self._find(piece + tail) is not None:
            self._decoder = before
            return False
        self._advance(piece, tail)
        return True

    def _complete(self, piece: str, *, is_checked: bool) -> bool:
        """Takes the piece of one token; whether a stop string completed with it, which ends the text."""
        tail = self._decoder.tail
        found = self._find(piece + tail) if is_checked else None
        if found is None:
            self._advance(piece, tail)
            return False
        offset, stop = found
        self.stop_reason, self._is_finished = stop, True
        self._cut(piece + tail, offset + (len(stop) if self._include_stop else 0))
        return True

    def _advance(self, piece: str, tail: str) -> None:
        self._append(piece)
        self._tail = tail
        if self._reach:
            self._recent = (self._recent + piece)[-self._reach :]

    def _find(self, fresh: str) -> tuple[int, str] | None:
        """The first stop string that completes in fresh: where it begins (less than 0: before fresh), and which."""
        known = _num_shared(self._tail, fresh)  # was looked at before, when it was the tail
        if known == len(fresh):
            return None
        near = self._recent + fresh
        if self._any_stop.search(near) is None:  # as good as always
            return None
        ends = len(self._recent) + known
        hits = [(near.find(stop, max(0, ends + 1 - len(stop))), stop) for stop in self._stop]
        begin, stop = min([hit for hit in hits if hit[0] >= 0], key=lambda hit: hit[0], default=(-1, ""))
        return (begin - len(self._recent), stop) if stop else None

    def _cut(self, fresh: str, offset: int) -> None:
        """Ends the text at an offset into fresh (less than 0: before it)."""
        before = self.text
        final = (before + fresh)[: len(before) + offset]
        self._pieces, self._num_taken = [final], 1
        self._held = final[self._num_streamed :]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a prompt, with the special tokens that the tokenizer adds, or without."""
    if not isinstance(text, str):
        raise ForedraftError(f"prompt must be a string or a list of token ids, not {type(text).__name__}")
    return _encode(tokenizer, text, add_special_tokens=add_special_tokens)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **template_args: Any,
) -> list[int]:
    """The ids of a conversation under the tokenizer's chat template, or the given one (Jinja).

    add_generation_prompt: end where the assistant's next message begins; None: unless continue_final_message, which
    ends in the middle of the last message, to be gone on with.

    Special tokens are those the template writes; none are added. template_args (tools, documents, a template's own
    switches) go to the template.
    """
    _check_messages(messages)
    if continue_final_message:
        _check_continuation(messages, add_generation_prompt)
    if chat_template is None and not tokenizer.chat_template:
        raise ForedraftError(
            "this tokenizer has no chat template: pass chat_template= (a Jinja string) or generate from a text prompt"
        )
    try:
        text = tokenizer.apply_chat_template(
            cast("list[dict[str, str]]", [dict(message) for message in messages]),
            chat_template=chat_template,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **template_args,
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ForedraftError(f"the chat template fails on these messages: {_one_line(error)}") from error
    return _encode(tokenizer, cast(str, text), add_special_tokens=False)


def _check_continuation(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None) -> None:
    if add_generation_prompt:
        raise ForedraftError("continue_final_message and add_generation_prompt exclude each other: leave one out")
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or not last["content"].strip():
        raise ForedraftError("continue_final_message needs a last message of the assistant, with text as its content")


def bad_words_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The token sequences of the words, each as it stands and after a space (which are often other tokens)."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in dict.fromkeys((word, word if word.startswith(" ") else f" {word}")):
            _check_unicode("bad_words entry", text)
            ids = _ids(tokenizer, text, add_special_tokens=False)
            if not ids:
                raise ForedraftError(f"bad_words entry {word!r} has no tokens in this vocabulary: leave it out")
            found[tuple(ids)] = None
    return list(found)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    _check_unicode("prompt", text)
    ids = _ids(tokenizer, text, add_special_tokens=add_special_tokens)
    if not ids:
        raise ForedraftError("prompt is empty: it must have at least one token, and this tokenizer adds none itself")
    return ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        # verbose=False: that a prompt is too long is for the engine to say, which knows the model's context.
        encoding = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ForedraftError(f"the tokenizer cannot encode this text: {_one_line(error)}") from error
    return list(cast("list[int]", encoding["input_ids"]))


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ForedraftError(
            f"{what} must be valid Unicode: it has the lone surrogate {text[error.start]!r} at character {error.start}"
        ) from None


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ForedraftError("messages must be a non-empty list of dicts with 'role' and 'content'")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ForedraftError(f"message {i} must be a dict with a 'role' and a 'content'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ForedraftError(f"the content of message {i} must be a string, not {type(content).__name__}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
