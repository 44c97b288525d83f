"""How close "auto" comes to the best fixed number of draft tokens, on recorded chats and stated times.

    python -m benchmarks.controller.recorded_chats record HEAD FILE --model MODEL [--quantization int8] [--temperature 0.8 [--seeded]]
        [--questions 80] [--max-tokens 192]
    python -m benchmarks.controller.recorded_chats replay FILE [--passes MS ...] [--drafts MS ...] [--chats 20] [--seeds 8]
        [--after FILE]

`record` answers MT-bench's questions and notes what `suffix` and the head would have drafted at every position of every answer. With
`--seeded`, drafts share the noise of the text. Without, above temperature 0, a drafted token is the text's token x with the probability
that it was accepted given that the text has x, min(1, q(x) / p(x)), and otherwise a wrong one. For trees it notes which of the head's
children the text's tokens would be (benchmarks/drafters/tree_gains.py), without a seed under noise that would have drawn this text.

`replay` runs the controller on these answers, in seconds and without noise. The record says which tokens are right. How long a step takes
is computed: from the times of passes of 1, 2, ... rows and of a head's drafts of 1, 2, ... tokens or levels. The first step of another
kind than the one before takes longer, as on a real machine. With `drift` the machine's speed changes every few seconds. Rates are computed
with undisturbed times, so they show what was chosen. Medians over seeds, relative to plain decoding; each seed has other chats in another
order. Differences below 0.015 are noise. With `--after`, each controller starts from the state that an earlier process stored, which
wrote as many chats of that record, and none of this seed's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.prompts import chat_ids
from benchmarks.controller.machine import Machine
from benchmarks.drafters.sibling_acceptance import distributions
from benchmarks.drafters.tree_gains import Ranks, path_in, ranks_of, shared_noise
from foredraft import LLM, SamplingParams
from foredraft.drafters import HybridDrafter
from foredraft.drafters.combined import CombinedDrafter, Offer
from foredraft.engine.proposal import Drafter, DraftRequest, Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Outcome, ScheduledSequence, Step
from foredraft.engine.token_tree import TreeShape
from foredraft.policy import Controller, ControllerState, FixedPolicy, Hybrid, Policy
from foredraft.train.head_acceptance import HeadOnTexts
from tests.laws import sampler_for
from tests.policy.simulator import no_time

LONGEST, SEED, WRONG = 8, 1234, -1
LOOKUP, MODEL, BOTH = "suffix", "eagle", "hybrid"
NOISE = {"without noise": (0.02, 0.0), "drift": (0.05, 0.4)}
COLD_DRAFT, COLD_PASS = 2.0, 1.07
"""How much longer a draft and a pass take after a step of another kind."""
LOOKUP_SECONDS, READING_SECONDS = 0.00006, 0.000006
"""Of a lookup's draft, and of each token that a head has missed."""
PASSES = [4.0, 4.35, 4.75, 5.0, 5.3, 5.7, 6.1, 6.6, 7.1]
DRAFTS = [0.79, 0.93, 1.07, 1.21, 1.35, 1.49, 1.63, 1.77]
"""Of SmolLM2 in int8 with its head, at temperature 0.8, on two cores with AVX-512; milliseconds."""


@dataclass(frozen=True)
class Chat:
    """tokens: the prompt, of num_prompt tokens, and the answer. drafts: by the number of tokens before it, each drafter's draft. ranks: of
    each token of the answer, by its place in a draft of the head, its rank among the children of a tree's node."""

    tokens: list[int]
    num_prompt: int
    temperature: float
    drafts: dict[int, dict[str, list[int]]]
    ranks: Ranks

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Chat:
        return cls(**{**fields, "drafts": {int(start): drafts for start, drafts in fields["drafts"].items()}})

    def tree(self, start: int, shape: TreeShape) -> list[int]:
        """The tokens of the head's tree of this shape: those of the text where the tree has them."""
        ids = [WRONG] * len(shape)
        for node, token in zip(
            path_in(self.ranks[start - self.num_prompt :], shape), self.tokens[start:], strict=False
        ):
            ids[node] = token
        return ids

    def path(self, start: int, ids: Sequence[int], parents: Sequence[int] | None) -> list[int]:
        """The places in a draft of the tokens that the text has."""
        walk = Offer.of(ids, parents).walk(self.tokens[start : start + len(ids)])
        return [right for _, right in walk if right is not None]

    def sequence(self, max_draft: int | None) -> TokenSequence:
        """The text before it is answered. max_draft: None leaves that to the policy."""
        prompt = self.tokens[: self.num_prompt]
        params = {"temperature": self.temperature} | ({"seed": SEED} if self.temperature else {})
        sampler = sampler_for(params, prompt=prompt)
        return TokenSequence(0, prompt, sampler, max_len=len(self.tokens), speculative_tokens=max_draft)


class Recorder(CombinedDrafter[Any]):
    """Asks its parts for the longest drafts in every step, and drafts nothing."""

    def __init__(self, parts: dict[str, Drafter]) -> None:
        super().__init__(parts)
        self.drafts: dict[int, dict[str, list[int]]] = {}

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        for request in requests:
            self.drafts[len(request.tokens)] = {
                name: list(part.propose([self._request_for(part, request, LONGEST)]).draft_ids[0])
                for name, part in self._parts.items()
            }
        return Proposal.certain([[] for _ in requests])


def record(
    llm: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int, *, is_seeded: bool
) -> list[Chat]:
    """llm: with the methods "suffix+eagle"."""
    recorder = Recorder({name: llm.drafters[name] for name in (LOOKUP, MODEL)})
    recording = llm.with_drafter(recorder, speculative_tokens=LONGEST)
    head, chats = HeadOnTexts(llm), []
    for number, prompt in enumerate(prompts):
        recorder.drafts = {}
        seed = SEED + number
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed if is_seeded else None)
        [answer] = recording.generate([prompt], params)
        tokens = [*prompt, *answer.outputs[0].token_ids]
        new = torch.tensor(tokens[len(prompt) :])
        places = [logits[len(prompt) :] for logits in head.logits(tokens, LONGEST)]
        drafts, noise = recorder.drafts, None
        if is_seeded:
            noise = shared_noise(seed, len(new), llm.target.traits.vocab_size)
        elif temperature:
            p = distributions(llm.target, [(tokens, len(prompt))], temperature).double()
            noise = noise_behind(new, p, torch.Generator().manual_seed(seed))
            drawn = drawn_drafts(new, p, places, temperature, Random(seed))
            drafts = {start: {**each, MODEL: drawn[start - len(prompt)]} for start, each in drafts.items()}
        chats.append(Chat(tokens, len(prompt), temperature, drafts, ranks_of(new, places, temperature, noise)))
    return chats


def noise_behind(drawn: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
    """Exp(1) noise E given that argmax(p / E) was drawn: the smallest E / p has the distribution of Exp(1), and is that of the drawn
    token; any other is larger than that by Exp(1) / p. drawn: [N]; p: [N, V] -> [N, V]"""
    least = torch.empty(len(p), 1, dtype=p.dtype).exponential_(generator=generator)
    more = torch.empty_like(p).exponential_(generator=generator).scatter_(1, drawn[:, None], 0.0)
    return least * p + more


def drawn_drafts(
    answer: Tensor, p: Tensor, places: Sequence[Tensor], temperature: float, chance: Random
) -> list[list[int]]:
    """What the head would draw at each position of an answer, as far as it is accepted, and then a token that is wrong. answer: [N];
    p: [N, V]. places: the head's logits by place in a draft, [N, V]"""
    column, tokens = answer[:, None], answer.tolist()
    of_target = p.gather(1, column)
    ratios = [
        ((logits.double() / temperature).softmax(-1).nan_to_num().gather(1, column) / of_target)[:, 0].tolist()
        for logits in places
    ]
    drafts = []
    for start in range(len(tokens)):
        draft = list[int]()
        for token, of_place in zip(tokens[start : start + len(places)], ratios, strict=False):
            if chance.random() >= of_place[start + len(draft)]:
                break
            draft.append(token)
        drafts.append([*draft, *[WRONG] * (len(places) - len(draft))])
    return drafts


class Recorded:
    """A drafter that drafts what was recorded. depth: of the last draft that it was asked for."""

    def __init__(self, name: str) -> None:
        self.chat: Chat
        self.depth = 0
        self.grows_trees = name == MODEL
        self._name = name

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        [request] = requests
        self.depth = request.max_len
        if request.shape is not None and self.grows_trees:
            shape = request.shape.cut(request.max_len)
            self.depth = shape.depth
            return Proposal.certain([self.chat.tree(len(request.tokens), shape)], [shape.parents])
        drafts = self.chat.drafts.get(len(request.tokens), {})
        return Proposal.certain([drafts.get(self._name, [])[: request.max_len]])

    def forget(self, seq_ids: list[int]) -> None: ...


@dataclass(frozen=True)
class Times:
    """In seconds. passes: of 1, 2, ... rows. drafts: of a head's 1, 2, ... tokens. tree_pass, tree_draft: how many times as long they
    take for a tree."""

    passes: Sequence[float]
    drafts: Sequence[float]
    tree_pass: float = 1.02
    tree_draft: float = 1.1

    def of_pass(self, num_rows: int) -> float:
        """Beyond the stated rows, each further one takes as long as the last that was stated."""
        num_more = max(num_rows - len(self.passes), 0)
        return self.passes[min(num_rows, len(self.passes)) - 1] + num_more * (self.passes[-1] - self.passes[-2])


class Replay:
    """Writes recorded chats one after another, as one engine does."""

    def __init__(self, policy: Policy, times: Times, machine: Machine) -> None:
        self._policy, self._times, self._machine = policy, times, machine
        self._lookup, self._model = Recorded(LOOKUP), Recorded(MODEL)
        both = HybridDrafter((LOOKUP, self._lookup), (MODEL, self._model))
        self._drafters: dict[str, Drafter] = {LOOKUP: self._lookup, MODEL: self._model, BOTH: both}
        self._last_kind, self._num_read = "", 0

    def write(self, chat: Chat, max_draft: int | None) -> None:
        self._lookup.chat = self._model.chat = chat
        for drafter in self._drafters.values():
            drafter.forget([0])
        self._num_read = 0
        sequence = chat.sequence(max_draft)
        num_unread = chat.num_prompt
        while not sequence.is_finished:
            self._policy.begin([sequence] if num_unread == 1 else [])
            self._step(chat, sequence, num_unread)
            num_unread = 1

    def _step(self, chat: Chat, sequence: TokenSequence, num_unread: int) -> None:
        budget, start = self._policy.draft_budget(sequence), len(sequence.tokens)
        most = budget.max_draft if num_unread == 1 or budget.drafter == LOOKUP else 0
        item = ScheduledSequence(sequence, num_unread, True, most, budget.drafter, shape=budget.shape if most else None)
        kind = budget.drafter if most else ""
        is_cold, self._last_kind = kind != self._last_kind, kind
        proposal, draft_times = self._draft(item, is_cold=is_cold) if most else (Proposal.certain([[]]), {})
        [ids], [parents] = proposal.draft_ids, proposal.draft_parents
        path = chat.path(start, ids, parents)
        factor = (COLD_PASS if is_cold else 1) * (1 if parents is None else self._times.tree_pass)
        read_time = self._machine.disturbed(self._times.of_pass(num_unread + len(ids)) * factor)
        new_ids = chat.tokens[start : start + len(path) + 1]
        outcome = Outcome(ids, parents, path, new_ids, torch.empty(0, 0), [])
        num_kept = sequence.commit(new_ids, len(ids))
        total = read_time + sum(draft_times.values())
        self._policy.observe(Step([item], [item], proposal, [outcome], draft_times, read_time, 0.0, [num_kept], total))

    def _draft(self, item: ScheduledSequence, *, is_cold: bool) -> tuple[Proposal, dict[str, float]]:
        tokens = item.sequence.tokens
        self._model.depth = 0
        request = DraftRequest(0, tokens, item.max_draft, item.sequence.sampler, shape=item.shape)
        proposal = self._drafters[item.drafter].propose([request])
        seconds = LOOKUP_SECONDS
        if self._model.depth:
            num_missed = len(tokens) - self._num_read
            reading = READING_SECONDS * num_missed if num_missed > LONGEST + 1 else 0.0
            factor = (COLD_DRAFT if is_cold else 1) * (1 if item.shape is None else self._times.tree_draft)
            seconds += (self._times.drafts[self._model.depth - 1] + reading) * factor
            self._num_read = len(tokens)
        return proposal, {item.drafter: self._machine.disturbed(seconds)}


@dataclass(frozen=True)
class System:
    """make: its policy, from the state of an earlier process. max_draft: the number of draft tokens if that is fixed."""

    make: Callable[[ControllerState | None], Policy]
    max_draft: int | None = None

    @classmethod
    def auto(cls, *names: str, trees: bool = False) -> System:
        hybrid = Hybrid(BOTH, LOOKUP, MODEL) if BOTH in names else None
        growing = [name for name in names if trees and name != LOOKUP]
        make = partial(Controller, names, max_draft=LONGEST, tree_drafters=growing, hybrid=hybrid, clock=no_time)
        return cls(lambda state: make(state=state))

    @classmethod
    def fixed(cls, drafter: str, max_draft: int) -> System:
        return cls(lambda _: FixedPolicy(drafter), max_draft)

    @classmethod
    def tree(cls, drafter: str, *paths: tuple[int, ...]) -> System:
        return cls(lambda _: FixedPolicy(drafter, TreeShape.of_paths(paths)), len(paths))

    def rate(
        self, chats: Sequence[Chat], times: Times, seed: int, noise: tuple[float, float], earlier: Sequence[Chat] = ()
    ) -> float:
        """Tokens per undisturbed second. earlier: the chats of an earlier process."""
        state = None
        if earlier and self.max_draft is None:  # a fixed number learns nothing
            before = self._write(earlier, times, Machine(-seed - 1, *noise), None)
            state = before.state() if isinstance(before, Controller) else None
        machine = Machine(seed, *noise)
        self._write(chats, times, machine, state)
        return sum(len(chat.tokens) - chat.num_prompt for chat in chats) / machine.undisturbed

    def _write(self, chats: Sequence[Chat], times: Times, machine: Machine, state: ControllerState | None) -> Policy:
        policy = self.make(state)
        replay = Replay(policy, times, machine)
        for chat in chats:
            replay.write(chat, self.max_draft)
        return policy


PLAIN = System.fixed(LOOKUP, 0)
SYSTEMS = {
    "suffix, auto": System.auto(LOOKUP),
    "head, auto": System.auto(MODEL),
    "head, auto with trees": System.auto(MODEL, trees=True),
    "suffix + head, auto": System.auto(LOOKUP, MODEL, BOTH),
    "suffix + head, auto with trees": System.auto(LOOKUP, MODEL, BOTH, trees=True),
    **{f"suffix, γ = {number}": System.fixed(LOOKUP, number) for number in (3, 8)},
    **{f"head, γ = {number}": System.fixed(MODEL, number) for number in (2, 3, 4)},
    **{f"suffix + head, γ = {number}": System.fixed(BOTH, number) for number in (3, 4, 6, 8)},
    **{
        f"{name}, tree of {title}": System.tree(drafter, *paths)
        for name, drafter in (("head", MODEL), ("suffix + head", BOTH))
        for title, paths in {
            "2 and 1": ((0,), (1,), (0, 0)),
            "2 and 2": ((0,), (1,), (0, 0), (1, 0)),
            "2, 2 and 1": ((0,), (1,), (0, 0), (1, 0), (0, 0, 0)),
        }.items()
    },
}


def chats_in(file: Path) -> list[Chat]:
    """Those of a record."""
    return [Chat.of(fields) for fields in json.loads(file.read_text())]


def replay(chats: Sequence[Chat], times: Times, num_chats: int, num_seeds: int, earlier: Sequence[Chat] | None) -> None:
    """Print the table. earlier: of the same questions in the same order, for earlier processes; None: there were none."""
    numbers = [Random(seed).sample(range(len(chats)), len(chats)) for seed in range(num_seeds)]
    orders = [[chats[number] for number in each[:num_chats]] for each in numbers]
    before = [[earlier[number] for number in each[num_chats:][:num_chats]] if earlier else [] for each in numbers]

    def rates(system: System, noise: tuple[float, float]) -> list[float]:
        runs = zip(orders, before, strict=True)
        return [system.rate(order, times, seed, noise, others) for seed, (order, others) in enumerate(runs)]

    print(f"| system | {' | '.join(NOISE)} |\n|---|{'---|' * len(NOISE)}")
    plain = {name: rates(PLAIN, noise) for name, noise in NOISE.items()}
    for name, system in SYSTEMS.items():
        found = [
            median(one / other for one, other in zip(rates(system, noise), plain[kind], strict=True))
            for kind, noise in NOISE.items()
        ]
        print(f"| {name} | {' | '.join(f'{ratio:.3f}' for ratio in found)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("head")
    recording.add_argument("file", type=Path)
    recording.add_argument("--model", required=True)
    recording.add_argument("--quantization")
    recording.add_argument("--temperature", type=float, default=0.0)
    recording.add_argument("--seeded", action="store_true")
    recording.add_argument("--questions", type=int, default=80)
    recording.add_argument("--max-tokens", type=int, default=192)
    replaying = commands.add_parser("replay")
    replaying.add_argument("file", type=Path)
    replaying.add_argument("--passes", type=float, nargs="+", default=PASSES, help="milliseconds, by rows")
    replaying.add_argument("--drafts", type=float, nargs=LONGEST, default=DRAFTS, help="milliseconds, by tokens")
    replaying.add_argument("--chats", type=int, default=20)
    replaying.add_argument("--seeds", type=int, default=8)
    replaying.add_argument("--after", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.command == "record":
        llm = LLM(
            args.model,
            args.head,
            method=f"{LOOKUP}+{MODEL}",
            quantization=args.quantization,
            enable_prefix_caching=False,
        )
        prompts = chat_ids(llm.text_tokenizer, args.questions)
        chats = record(llm, prompts, args.temperature, args.max_tokens, is_seeded=args.seeded)
        args.file.write_text(json.dumps([asdict(chat) for chat in chats]))
        return
    chats = chats_in(args.file)
    times = Times([one / 1000 for one in args.passes], [one / 1000 for one in args.drafts])
    replay(chats, times, args.chats, args.seeds, chats_in(args.after) if args.after else None)


if __name__ == "__main__":
    main()
