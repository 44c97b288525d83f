"""What the benchmarks of a GPU measure: the full size by default, or toys that show that the scripts run."""

from __future__ import annotations

from dataclasses import dataclass

WideShape = tuple[int, int, int, int]
"""hidden, layers, intermediate, heads"""


@dataclass(frozen=True, slots=True)
class Size:
    """hidden to vocab: of the random target, of Llama-3.1-8B's shape by default. wide, wide_draft: the embedded pair is widened to these.
    tree: batch and nodes of the verified trees."""

    hidden: int = 4096
    layers: int = 32
    intermediate: int = 14336
    vocab: int = 128_256
    copied: int = 4 << 30
    num_prompts: int = 50
    max_tokens: int = 256
    prompt: int = 256
    context: int = 1024
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    widths: tuple[int, ...] = (1, 2, 5, 8, 16, 32, 64)
    tree: tuple[int, int] = (8, 8)
    wide: WideShape = (4096, 8, 5632, 64)
    wide_draft: WideShape = (1024, 1, 2816, 16)
    product_rows: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (256, 1024, 8192)
    parts: tuple[int, ...] = (1, 4, 16)

    @property
    def num_heads(self) -> int:
        """Heads are 128 wide; four share one key/value head."""
        return self.hidden // 128

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.num_heads // 4)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """[n, k] of the matrices that a layer reads, and of the lm_head."""
        kv_width = 2 * self.num_kv_heads * 128
        return {
            "qkv": (self.hidden + kv_width, self.hidden),
            "out": (self.hidden, self.hidden),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


TOYS = Size(
    hidden=128,
    layers=1,
    intermediate=256,
    vocab=96,
    copied=1 << 20,
    num_prompts=4,
    max_tokens=16,
    prompt=16,
    context=64,
    batches=(1, 2),
    widths=(1, 2, 5, 8),
    tree=(2, 4),
    wide=(256, 8, 704, 4),
    wide_draft=(256, 1, 704, 4),
    product_rows=(2,),
    contexts=(70,),
    parts=(1, 2),
)
