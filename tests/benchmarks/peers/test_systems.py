"""The table of systems."""

from __future__ import annotations

import pytest

from benchmarks.peers.systems import NAMES, PEERS, Peer, chosen, precisions_of, reference_of
from benchmarks.peers.workers.setup import NAMES as ENVIRONMENTS


def test_names_are_unique_and_environments_exist() -> None:
    assert len(set(NAMES)) == len(PEERS)
    assert {peer.environment for peer in PEERS} <= {"", *ENVIRONMENTS}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_texts_are_compared_with_ours_at_the_same_number_of_bits(peer: Peer) -> None:
    (reference,) = chosen([reference_of(peer)])
    assert reference.worker == "foredraft_worker"
    assert reference.bits == peer.bits


def test_systems_that_read_the_same_file_are_compared() -> None:
    assert [reference_of(peer) for peer in chosen(["llamacpp-q4_k_m"])] == ["foredraft-q4_k_m"]


def test_an_environment_converts_the_files_that_its_systems_need() -> None:
    systems = chosen(["llamacpp-q4_0", "openvino-int4", "llamacpp-bf16"])
    assert sorted(precisions_of("llamacpp", systems)) == ["bf16", "q4_0"]
    assert precisions_of("openvino", systems) == ["int4"]
    assert precisions_of("vllm", systems) == []
