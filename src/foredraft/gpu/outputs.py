"""The tokens that a bucket's passes generate, at fixed addresses, where other passes read them and from where a graph copies them to the
host."""

from __future__ import annotations

import torch

from foredraft.gpu.buckets import Bucket
from foredraft.utils.host_copy import HostCopy


class Outputs:
    """ids: [depth, spans] int64, for a bucket that generates."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.ids = torch.zeros(bucket.depth, bucket.num_spans, dtype=torch.int64, device=device)
        is_apart = device.type == "cuda"
        self._host = torch.zeros(self.ids.shape, dtype=torch.int64, pin_memory=True) if is_apart else self.ids
        self._sent = torch.cuda.Event() if is_apart else None  # type: ignore[no-untyped-call]
        self._copy: HostCopy | None = None

    def wait(self) -> None:
        """Let the previous copy be read before passes write to the same memory."""
        if self._copy is not None:
            self._copy.tolist()

    def send(self) -> None:
        """Copy the ids to the host, as part of a graph."""
        if self._host is not self.ids:
            self._host.copy_(self.ids, non_blocking=True)

    def copy(self) -> HostCopy:
        """The copy that has been sent."""
        if self._sent is not None:
            self._sent.record()
        self._copy = HostCopy(self.ids, self._host, self._sent)
        return self._copy
