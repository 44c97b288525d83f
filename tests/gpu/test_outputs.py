"""Generated tokens can be read after their memory was written again."""

from __future__ import annotations

import torch

from foredraft.gpu import Bucket, Outputs


def test_a_copy_keeps_its_tokens_when_the_next_ones_are_written(device: torch.device) -> None:
    outputs, copies = Outputs(Bucket(2, 2, 2, depth=3), device), []
    for token in (7, 8):
        outputs.wait()
        outputs.ids.fill_(token)
        outputs.send()
        copies.append(outputs.copy())
        assert copies[-1].on_device is outputs.ids
    assert [copy.tolist() for copy in copies] == [[[7, 7]] * 3, [[8, 8]] * 3]
