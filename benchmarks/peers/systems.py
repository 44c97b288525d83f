"""The programs that are compared, each at the precisions that it offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLAIN, AUTO, HEAD = "plain", "auto", "eagle+suffix"
WITHOUT_GAMMA = (PLAIN, AUTO, HEAD)
"""Modes in which γ is not chosen beforehand: there is none, or the program chooses it at every step."""


@dataclass(frozen=True)
class Peer:
    """A program at a precision. separate: it fixes mode and γ when it starts, so each combination runs in its own process."""

    name: str
    worker: str
    precision: str
    bits: int
    modes: tuple[str, ...] = (PLAIN, "draft_model", "ngram")
    environment: str = ""
    separate: bool = False


_METHODS = (PLAIN, AUTO, "draft_model", "ngram", "suffix", HEAD)

PEERS = (
    Peer("foredraft-bf16", "foredraft_worker", "bf16", 16, (*_METHODS, "self-int8", "self-int4")),
    Peer("foredraft-int8", "foredraft_worker", "int8", 8, _METHODS),
    Peer("foredraft-int4", "foredraft_worker", "int4", 4, _METHODS),
    Peer("foredraft-q4_0", "foredraft_worker", "q4_0", 4, _METHODS),
    Peer("foredraft-q4_1", "foredraft_worker", "q4_1", 4, _METHODS),
    Peer("foredraft-q4_k_m", "foredraft_worker", "q4_k_m", 4, _METHODS),
    Peer("transformers-bf16", "transformers_worker", "bf16", 16),
    Peer("vllm-bf16", "vllm_worker", "bf16", 16, environment="vllm", separate=True),
    Peer("openvino-fp16", "openvino_worker", "fp16", 16, environment="openvino"),
    Peer("openvino-int8", "openvino_worker", "int8", 8, environment="openvino"),
    Peer("openvino-int4", "openvino_worker", "int4", 4, environment="openvino"),
    Peer("llamacpp-bf16", "llamacpp_worker", "bf16", 16, environment="llamacpp", separate=True),
    Peer("llamacpp-q8_0", "llamacpp_worker", "q8_0", 8, environment="llamacpp", separate=True),
    Peer("llamacpp-q4_0", "llamacpp_worker", "q4_0", 4, environment="llamacpp", separate=True),
    Peer("llamacpp-q4_1", "llamacpp_worker", "q4_1", 4, environment="llamacpp", separate=True),
    Peer("llamacpp-q4_k_m", "llamacpp_worker", "q4_k_m", 4, environment="llamacpp", separate=True),
)
NAMES = tuple(peer.name for peer in PEERS)
_BY_BITS = {16: "foredraft-bf16", 8: "foredraft-int8", 4: "foredraft-int4"}


def chosen(names: Sequence[str]) -> list[Peer]:
    return [peer for peer in PEERS if peer.name in names]


def reference_of(peer: Peer) -> str:
    """foredraft's system that a program's texts are compared with: the one on the same file, or else at the same number of bits."""
    same = f"foredraft-{peer.precision}"
    return same if same in NAMES else _BY_BITS[peer.bits]


def precisions_of(environment: str, peers: Sequence[Peer]) -> list[str]:
    """The precisions that models have to be converted to for an environment."""
    return [peer.precision for peer in peers if peer.environment == environment]
