"""A Llama-like decoder on a GPU: passes over static memory, replayed from CUDA graphs (see foredraft.gpu).

The counterpart of stack.py for models of Llama's form; the probe compares its logits with the library's forward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils.logging import tqdm

from foredraft.gpu import (
    Bucket,
    DeviceLayer,
    DeviceStack,
    Inputs,
    Linear,
    Noise,
    Outputs,
    Runner,
    Shape,
    SlotPaths,
    bucket_for,
    drafting_buckets,
    on,
    verification_buckets,
)
from foredraft.kernels import DrawSpec, StackBatch
from foredraft.model.batch import Branch, RaggedBatch, Reading, branches_of
from foredraft.model.generation import Generated, Generation
from foredraft.model.rotary import rotation_table
from foredraft.model.stored import is_linear
from foredraft.model.warm_up import WarmUpSizes
from foredraft.sampling import Pending, TokenProbs, to_device
from foredraft.utils.host_copy import HostCopy

_FORM = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_WINDOW_IN_CONFIG = ("MistralForCausalLM",)
"""Families whose layers do not say how many keys they see. The configurations of the others may name a window that the model ignores."""

_MOST_POSITIONS = 1 << 17
"""Rotary angles are kept for at most this many positions, whatever the context: 64 MiB at a width of 128."""


class DeviceStackBody:
    """hf: its layers and its head are taken from it, one at a time; the embedding stays. runner: runs a pass whose bucket is worth a
    graph. is_batch_invariant: whether products are computed by our kernel, row by row independently, and not by PyTorch."""

    kernels = None

    def __init__(self, hf: PreTrainedModel, context_len: int, runner: Runner, *, is_batch_invariant: bool) -> None:
        from foredraft.gpu import passes, rows  # this class is used only if Triton is installed

        self.is_batch_invariant = is_batch_invariant
        self._passes, self._rows = passes, rows
        self._arithmetic = passes.ROW_EXACT if is_batch_invariant else passes.FASTEST
        self._runner = runner
        self._stack = _take(hf, min(context_len, _MOST_POSITIONS))
        shape = self._stack.shape
        self._keys_like = self._stack.embedding.new_empty(shape.num_kv_heads, 0, shape.head_dim)
        self._device = self._stack.embedding.device
        self._token_probs = torch.empty(0, device=self._device)
        self._inputs: dict[Bucket, Inputs] = {}
        self._steps: dict[Bucket, Inputs] = {}
        self._outputs: dict[Bucket, Outputs] = {}

    @torch.inference_mode()
    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = (), ids: Tensor | None = None) -> Reading:
        """ids: what the batch's placeholders stand for."""
        with on(self._device):
            paths = None if batch.is_contiguous else slot_paths(batch)
            num_slots = 0 if paths is None else len(paths.slots)
            bucket = bucket_for(len(batch.ids), len(batch.spans), len(batch.wanted), num_slots=num_slots)
            inputs = self._inputs_of(bucket)
            inputs.fill(self._located(batch), paths, ids)
            logits, *features = self._compute(inputs, 0, tuple(taps))
            hidden = features[0][: len(batch.ids)].clone() if features else None
            return Reading(logits[: len(batch.wanted)].clone(), hidden)

    def launch(self, batch: RaggedBatch, ids: Tensor, taps: Sequence[int] = ()) -> Reading | None:
        """See PlaceholderBody."""
        return self(batch, taps, ids) if ids.device == self._device else None

    @property
    def can_adjust(self) -> bool:
        """Adjusted drafts take one pass per token."""
        return False

    def can_generate(self, specs: Sequence[DrawSpec]) -> bool:
        """Truncated distributions are not supported: they take one pass per token."""
        return all(spec.temperature == 0 or spec.truncation is None for spec in specs)

    @torch.inference_mode()
    def generate(
        self, batch: RaggedBatch, lens: Sequence[int], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> Generation:
        """See LanguageModel.launch_generation. Runs in one replay."""
        noise = _noise_of(specs)
        with on(self._device):
            inputs = self._inputs_of(bucket_for(len(batch.ids), len(batch.spans), len(batch.wanted), max(lens), noise))
            inputs.fill(self._located(batch))
            if noise:
                inputs.fill_noise(specs)
            outputs = self._outputs_of(inputs.bucket)
            outputs.wait()
            probs = self._compute(inputs, vocab_size)
            copy = outputs.copy()
            token_probs = None
            if any(spec.is_drawn for spec in specs):
                token_probs = TokenProbs(_drawn_rows(probs[0], lens, specs, vocab_size))
        return Generation(Pending([], lambda _: _generated(copy, lens, token_probs)), copy)

    def take_over(self) -> None:
        """Nothing to do: the model's layers have been taken already."""

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Capture every bucket that decoding and drafting need, with a progress bar. Prompts need none."""
        buckets = drafting_buckets if sizes.drafts else verification_buckets
        with torch.inference_mode(), on(self._device):
            # the largest first, so that the others reuse its shared memory
            largest_first = list(buckets(sizes.max_num_seqs, sizes.max_tokens))[::-1]
            for bucket in tqdm(largest_first, desc="Capturing graphs", leave=False):
                inputs = self._inputs_of(bucket)
                inputs.clear()  # an earlier pass may have left the addresses of memory that holds other things now
                computed = self._compute(inputs, sizes.vocab_size, sizes.taps)
                if not bucket.depth:
                    self._rows.top_two(computed[0])  # compiles the choice of greedy tokens

    def _compute(self, inputs: Inputs, vocab_size: int, taps: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """Run the bucket's pass -> its logits and any tapped hidden states; or its generation -> any distributions. vocab_size: how many
        ids to choose from. taps: of a pass."""
        bucket = inputs.bucket
        compute = partial(self._generate, inputs, vocab_size) if bucket.depth else partial(self._read, inputs, taps)
        key = (bucket, vocab_size if bucket.depth else 0, taps)
        if not bucket.is_graph:
            inputs.send()
            inputs.record()  # the next chunk of a prompt can be prepared during the pass
            return compute()

        def send_and_compute() -> tuple[Tensor, ...]:
            inputs.send()
            return compute()

        computed = self._runner(key, send_and_compute)
        inputs.record()
        return computed

    def _read(self, inputs: Inputs, taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        logits, features = self._passes.read(self._stack, inputs, self._arithmetic, taps)
        return (logits,) if features is None else (logits, features)

    def _generate(self, inputs: Inputs, vocab_size: int) -> tuple[Tensor, ...]:
        bucket = inputs.bucket
        step, outputs = self._step_of(bucket), self._outputs_of(bucket)
        token_probs = self._token_probs_in(bucket.depth, bucket.num_spans, vocab_size) if bucket.noise else None
        self._passes.generate(self._stack, inputs, step, vocab_size, self._arithmetic, outputs, token_probs)
        return () if token_probs is None else (token_probs,)

    def _token_probs_in(self, depth: int, num_spans: int, vocab_size: int) -> Tensor:
        """[depth, num_spans, V], in memory that all buckets share, because V-wide rows for each bucket would take gigabytes."""
        shape = (depth, num_spans, min(vocab_size, self._stack.head.weight.shape[0]))
        if prod(shape) > self._token_probs.numel():
            self._token_probs = torch.empty(prod(shape), device=self._device)
        return self._token_probs[: prod(shape)].view(shape)

    def _inputs_of(self, bucket: Bucket) -> Inputs:
        if bucket not in self._inputs:
            self._inputs[bucket] = self._new_inputs(bucket)
        return self._inputs[bucket]

    def _step_of(self, bucket: Bucket) -> Inputs:
        """The inputs of the passes after the first: a row for each span."""
        if bucket not in self._steps:
            step = bucket_for(bucket.num_spans, bucket.num_spans, bucket.num_spans)
            self._steps[bucket] = self._new_inputs(step)
        return self._steps[bucket]

    def _outputs_of(self, bucket: Bucket) -> Outputs:
        if bucket not in self._outputs:
            self._outputs[bucket] = Outputs(bucket, self._device)
        return self._outputs[bucket]

    def _new_inputs(self, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(self._stack.layers), self._device)

    def _located(self, batch: RaggedBatch) -> StackBatch:
        return batch.located(len(self._stack.layers), self._keys_like)


def slot_paths(batch: RaggedBatch) -> SlotPaths:
    """The paths of all rows: one for a chain, and one per branch for a tree."""
    slots: list[int] = []
    first_slots = [0] * len(batch.ids)
    for span in batch.spans:
        rows = range(span.num_rows)
        own = [batch.slots[span.first_row + row] for row in rows]
        for branch in [Branch([*rows], own)] if span.paths is None else branches_of(span.paths):
            for row in branch.rows:
                first_slots[span.first_row + row] = len(slots)
            slots += branch.slots
    return SlotPaths(slots, first_slots)


def has_device_form(hf: Any) -> bool:
    """Whether DeviceStackBody computes the same as this model."""
    if type(hf).__name__ not in _FORM:
        return False
    mlps = [layer.mlp for layer in hf.model.layers]
    attentions = [layer.self_attn for layer in hf.model.layers]
    parts = [part for parent in [*mlps, *attentions] for part in parent.children()]
    rotated = hf.model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1]
    return (
        all(type(mlp.act_fn) in (nn.SiLU, type(ACT2FN["silu"])) for mlp in mlps)
        and all(mlp.gate_proj.bias is None and mlp.up_proj.bias is None for mlp in mlps)
        and all(is_linear(part) or not hasattr(part, "weight") or _is_norm(part) for part in parts)
        and all(attention.head_dim == rotated for attention in attentions)
        and rotated % 2 == 0
    )


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _noise_of(specs: Sequence[DrawSpec]) -> Noise:
    if any(spec.keys for spec in specs):
        return Noise.SHARED
    return Noise.OWN if any(spec.is_drawn for spec in specs) else Noise.NONE


def _drawn_rows(token_probs: Tensor, lens: Sequence[int], specs: Sequence[DrawSpec], vocab_size: int) -> Tensor:
    """token_probs: [depth, spans, V], where V may be less than vocab_size -> the rows of drawn tokens, span after span,
    [R, vocab_size]"""
    places = [(step, i) for i, spec in enumerate(specs) if spec.is_drawn for step in range(lens[i])]
    steps, columns = to_device(places, token_probs.device, torch.int64).T
    return functional.pad(token_probs[steps, columns], (0, vocab_size - token_probs.shape[2]))


def _generated(ids: HostCopy, lens: Sequence[int], token_probs: TokenProbs | None) -> Generated:
    """ids: [depth, spans]"""
    by_step = ids.tolist()
    rows = ([row[i] for row in by_step[:length]] for i, length in enumerate(lens))
    return Generated([_up_to_nan(row) for row in rows], token_probs)


def _up_to_nan(ids: list[int]) -> list[int]:
    return ids[: ids.index(-1)] if -1 in ids else ids


@torch.inference_mode()
def _take(hf: Any, num_positions: int) -> DeviceStack:
    layers = hf.model.layers
    first = layers[0].self_attn
    head_dim = int(first.head_dim)
    shape = Shape(
        first.q_proj.out_features // head_dim,
        first.k_proj.out_features // head_dim,
        head_dim,
        float(hf.model.norm.variance_epsilon),
        float(first.scaling),
        *rotation_table(hf, num_positions),
    )
    taken = [_take_layer(hf, index) for index in range(len(layers))]
    head = Linear(hf.lm_head.weight.detach(), hf.lm_head.bias)
    return DeviceStack(taken, hf.model.embed_tokens.weight.detach(), hf.model.norm.weight.detach(), head, shape)


def _take_layer(hf: Any, index: int) -> DeviceLayer:
    """Join matrices with the same input; the layer itself is dropped, so that it is never in memory twice."""
    layer = hf.model.layers[index]
    attention, mlp = layer.self_attn, layer.mlp
    taken = DeviceLayer(
        layer.input_layernorm.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        _weight_of(getattr(attention, "q_norm", None)),
        _weight_of(getattr(attention, "k_norm", None)),
        Linear(*joined_linears([attention.q_proj, attention.k_proj, attention.v_proj])),
        Linear(attention.o_proj.weight.detach(), attention.o_proj.bias),
        Linear(*joined_linears([mlp.gate_proj, mlp.up_proj])),
        Linear(mlp.down_proj.weight.detach(), mlp.down_proj.bias),
        _window_of(hf, attention),
    )
    hf.model.layers[index] = nn.Module()
    return taken


def _window_of(hf: Any, attention: Any) -> int:
    """How many keys a query of this layer sees; 0: all."""
    owner = hf.config if type(hf).__name__ in _WINDOW_IN_CONFIG else attention
    return int(getattr(owner, "sliding_window", None) or 0)


def _weight_of(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.detach()


def joined_linears(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Join several products of one input."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight = torch.cat(weights)
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
    ]
    return weight, torch.cat(biases)
