"""A Hugging Face model that reads ragged batches with our KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.region import Region, Regions, padded
from foredraft.engine.sources import NO_SOURCE, Source, SourceKeys, TokenSource
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError, ModelError
from foredraft.kernels import DrawSpec, Kernels
from foredraft.model.batch import RaggedBatch, Read, Reading, flatten, remember
from foredraft.model.encoder_decoder import EncoderDecoderBody
from foredraft.model.encoder_inputs import FeatureShape, feature_shape_of
from foredraft.model.feature_encoder import FeatureEncoderBody
from foredraft.model.generation import Generated, Generation, generate_step_by_step
from foredraft.model.library import LibraryBody
from foredraft.model.mask_token import mask_token_of
from foredraft.model.memory import is_spread, memory_for_layers
from foredraft.model.placeholders import LaunchedRead
from foredraft.model.ranks import is_split
from foredraft.model.taps import FINAL_NORM
from foredraft.model.warm_up import WarmUpSizes
from foredraft.sampling import Pending
from foredraft.utils.host_copy import HostCopy


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a model, determined when it is loaded.

    vocab_size: the width of its logits. context_len: the longest sequence it can read. bytes_per_token: KV cache per token. row_exact:
    whether a row's bits do not depend on the rest of the batch, as measured (see docs/internals/exactness.md).

    For encoder-decoders: source_len: the longest source, 0 for other models. bytes_per_source_token: KV cache per source token.
    start_ids: the ids that the decoder starts with, () if the checkpoint does not define them. feature_shape: of the encoder's input,
    None if that is ids. shares_encoder: whether the model has no encoder of its own and is given the output of its target's.
    """

    name: str
    vocab_size: int
    context_len: int
    bytes_per_token: int
    row_exact: bool
    source_len: int = 0
    bytes_per_source_token: int = 0
    start_ids: tuple[int, ...] = ()
    feature_shape: FeatureShape | None = None
    shares_encoder: bool = False


class ModelInputs(NamedTuple):
    """A model's inputs for a prompt. source: the encoder's input, if there is an encoder. tokens: the ids that the generated text
    follows."""

    source: Source
    tokens: list[int]


class Body(Protocol):
    """Computes forward passes, without gradients. kernels: the compiled kernels that its attention uses. is_batch_invariant: whether a
    row's sums are made in the same order in every pass, also on devices other than the CPU.

    A body that runs PyTorch's operations enters inference mode itself: the compiled one does not, and entering it takes tens of
    microseconds after a pass that left nothing in the caches.
    """

    @property
    def is_batch_invariant(self) -> bool: ...

    @property
    def kernels(self) -> Kernels | None: ...

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        """taps: the wanted hidden states: i for the input of layer i (0: the embeddings), the number of layers for the output of the last
        layer, FINAL_NORM for that output after the final norm."""

    def take_over(self) -> None:
        """Assume from now on that nobody else runs the model."""

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Prepare passes of these sizes, so that no request has to wait for it."""


@runtime_checkable
class GeneratingBody(Body, Protocol):
    """A body that generates several tokens in one call."""

    @property
    def can_adjust(self) -> bool:
        """Whether it applies the adjustments of specs when it generates or grows tokens."""

    def can_generate(self, specs: Sequence[DrawSpec]) -> bool:
        """Whether it can choose tokens as all of these specs require, apart from adjustments."""

    def generate(
        self, batch: RaggedBatch, lens: Sequence[int], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> Generation:
        """See LanguageModel.launch_generation. batch: the last row of each span is wanted, and slots equal positions."""


@runtime_checkable
class PlaceholderBody(Body, Protocol):
    """A body on a device, for tokens that the device is still choosing."""

    def launch(self, batch: RaggedBatch, ids: Tensor, taps: Sequence[int] = ()) -> Reading | None:
        """A pass whose batch may have placeholders (see placeholders.py), which stand for ids. None if these are on another device."""


@runtime_checkable
class GrowingBody(Body, Protocol):
    """A body that grows trees of tokens in one call."""

    def grow(
        self, batch: RaggedBatch, shapes: Sequence[TreeShape], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> list[list[int]]:
        """See LanguageModel.grow. batch: the last row of each span is wanted, and slots equal positions."""


@runtime_checkable
class SourceReadingBody(Body, Protocol):
    """A body whose decoder attends to sources."""

    def read_sources(self, sources: Sequence[SourceKeys]) -> None:
        """Fill in the keys and values of these sources in one pass. Called in inference mode."""


@runtime_checkable
class SharedBody(Body, Protocol):
    """A body whose passes other processes run too, with regions of their own."""

    def new_region(self) -> Region:
        """A region whose changes the other processes repeat."""


def library_body(hf: PreTrainedModel) -> Body:
    """A body that runs the library's own code with our attention."""
    return source_reading_body(hf) if hf.config.is_encoder_decoder else LibraryBody(hf)


def source_reading_body(hf: PreTrainedModel, kernels: Kernels | None = None) -> EncoderDecoderBody:
    """The same for an encoder-decoder. kernels: for attention; None: PyTorch's."""
    return (EncoderDecoderBody if feature_shape_of(hf.config) is None else FeatureEncoderBody)(hf, kernels)


class LanguageModel:
    """Tokens in, logits out. body: None runs the Hugging Face model itself, and leaves it unchanged."""

    def __init__(self, hf: PreTrainedModel, traits: Traits, body: Body | None = None) -> None:
        self.hf = hf
        self.traits = traits
        self.body = body or library_body(hf)
        self._generating = self.body if isinstance(self.body, GeneratingBody) else None
        self._growing = self.body if isinstance(self.body, GrowingBody) else None
        self._source_reading = self.body if isinstance(self.body, SourceReadingBody) else None
        self._launching = self.body if isinstance(self.body, PlaceholderBody) else None
        self._new_region = self.body.new_region if isinstance(self.body, SharedBody) else Region

    def take_over(self) -> None:
        """Assume from now on that nobody else runs the model."""
        self.body.take_over()

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Prepare passes of these sizes, so that no request has to wait for it."""
        self.body.warm_up(sizes)

    @property
    def mask_token(self) -> int | None:
        """The id that stands for a position not yet written, if the model was trained with one; see mask_token.py."""
        return mask_token_of(self.hf.config.to_dict())

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.hf.device)

    @property
    def memory_for_cache(self) -> int | None:
        """Bytes free for keys and values, over all devices that hold the model; None where the system does not say."""
        return memory_for_layers(self.hf)

    @property
    def is_whole(self) -> bool:
        """Whether one device holds all of its weights."""
        return not (is_spread(self.hf) or is_split(self.hf))

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder, which reads a source."""
        return self.traits.source_len > 0

    def inputs_for(self, prompt: Sequence[int]) -> ModelInputs:
        """The prompt is the source for a model with an encoder, and the text to continue for any other. Raises ForedraftError for a model
        whose encoder does not read ids."""
        self.check_reads_text()
        if self.has_encoder:
            return ModelInputs(TokenSource(tuple(prompt)), list(self.traits.start_ids))
        return ModelInputs(NO_SOURCE, list(prompt))

    def check_reads_text(self) -> None:
        """Raise ForedraftError for a model that reads audio."""
        if self.traits.feature_shape is not None:
            raise ForedraftError(
                f'{self.traits.name} reads audio, not text: give {{"input_features": ...}} from its feature extractor'
            )

    def inputs_for_features(self, features: Any) -> ModelInputs:
        """The same for audio features, see FeatureShape.source_of. Raises ForedraftError for a model that does not read audio."""
        if self.traits.feature_shape is None:
            raise ForedraftError(f"input_features are for models that read audio, but {self.traits.name} reads text")
        return ModelInputs(self.traits.feature_shape.source_of(features), list(self.traits.start_ids))

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may still be running when `read` has returned."""
        return self.device.type != "cpu"

    def new_cache(self, pool: MemoryPool, taps: Sequence[int] = (), *, keeps_encoded: bool = False) -> KVCache:
        """taps: the hidden states to keep, see Body. keeps_encoded: whether to keep the encoder's output. Raises ModelError for a tap
        that does not exist, and for taps of an encoder-decoder."""
        if taps and self.has_encoder:
            raise ModelError(f"{self.traits.name} is an encoder-decoder, whose hidden states cannot be kept")
        config = self.hf.config.get_text_config()
        if any(not FINAL_NORM <= tap <= config.num_hidden_layers for tap in taps):
            raise ModelError(
                f"{self.traits.name} has {config.num_hidden_layers} layers, but hidden states {list(taps)} were requested: "
                f"0 to {config.num_hidden_layers - 1} are the inputs of its layers, {config.num_hidden_layers} is the output of the last, "
                f"and {FINAL_NORM} is what its lm_head reads"
            )
        return KVCache(
            pool,
            self.bytes_per_token(taps),
            self.traits.context_len,
            taps,
            self.bytes_per_source_token(keeps_encoded=keeps_encoded),
            self._new_region,
            keeps_encoded=keeps_encoded,
        )

    def bytes_per_token(self, taps: Sequence[int] = ()) -> int:
        """Bytes of cache per token, with the features of these taps."""
        width, itemsize = self.hf.config.get_text_config().hidden_size, self.hf.dtype.itemsize
        return int(self.traits.bytes_per_token + len(taps) * width * itemsize)

    def bytes_per_source_token(self, *, keeps_encoded: bool = False) -> int:
        """Bytes of cache per source token, with the encoder's output if that is kept."""
        width = self.hf.get_encoder().config.hidden_size if keeps_encoded else 0
        return int(self.traits.bytes_per_source_token + width * self.hf.dtype.itemsize)

    def scratch_cache(
        self,
        lengths: Sequence[int],
        taps: Sequence[int] = (),
        sources: Sequence[Source] = (),
        *,
        keeps_encoded: bool = False,
    ) -> KVCache:
        """A cache outside any budget, for a trial or a measurement: sequence i has room for lengths[i] tokens. taps, keeps_encoded: as in
        new_cache. sources: one per sequence, for a model with an encoder."""
        source_bytes = self.bytes_per_source_token(keeps_encoded=keeps_encoded)
        cache = self.new_cache(MemoryPool(sum(map(len, sources)) * source_bytes), taps, keeps_encoded=keeps_encoded)
        cache.pool.evictables.clear()  # no cycle: the memory is freed with the cache, without waiting for the collector
        for seq_id, length in enumerate(lengths):
            cache.region(seq_id).resize(padded(length))
        for seq_id, source in enumerate(sources):
            cache.open(seq_id, source, is_shared=False)
        return cache

    def launch_read(self, reads: Sequence[Read], cache: Regions, ids: HostCopy) -> LaunchedRead | None:
        """Start a pass over tokens that a device is still choosing, whose placeholders in the reads (see placeholders.py) stand for ids. It
        ends when `read` is given its result, and the cache holds nothing new before. None if the model cannot, or need not, start
        early."""
        if self._launching is None:
            return None
        batch = flatten(reads, cache)
        reading = self._launching.launch(batch, ids.on_device, cache.taps)
        return None if reading is None else LaunchedRead(reads, batch, ids, reading)

    def read(self, reads: Sequence[Read], cache: Regions, launched: LaunchedRead | None = None) -> Tensor:
        """One pass over all reads. Afterwards the cache also holds their tokens, and their features if it has taps. Room must have been
        reserved. Sources that no pass has read yet are read first. launched: a pass that may have read the same tokens; it is not
        repeated if it has.

        -> logits [sum(num_logits), V], in the order of the reads
        """
        if launched is not None and launched.is_of(reads):
            batch, (logits, hidden) = launched.batch, launched.reading
        else:
            batch = flatten(reads, cache)
            self._read_sources(batch)
            logits, hidden = self.body(batch, cache.taps)
        if hidden is not None:
            for span in batch.spans:
                span.region.write_features(hidden.narrow(0, span.first_row, span.num_rows), span.start)
        remember(reads, batch)
        return logits

    def _read_sources(self, batch: RaggedBatch) -> None:
        """Read the batch's sources that no pass has read yet."""
        if self._source_reading is None:
            return
        sources = (span.region.source for span in batch.spans)
        unread = {id(source): source for source in sources if source is not None and not source.is_read}
        if unread:
            with torch.inference_mode():
                self._source_reading.read_sources(list(unread.values()))

    def read_features(self, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Tensor]:
        """The hidden states [N, F] of whole texts, from one pass outside any budget. taps: as in new_cache."""
        cache = self.scratch_cache([len(tokens) for tokens in texts], taps)
        self.read([Read(i, tokens, 0) for i, tokens in enumerate(texts)], cache)
        return [features.clone() for i in range(len(texts)) if (features := cache.features(i)) is not None]

    def generate(
        self, reads: Sequence[Read], lens: Sequence[int], vocab_size: int, cache: Regions, specs: Sequence[DrawSpec]
    ) -> Generated:
        """Read, then generate lens[i] >= 1 tokens after reads[i], chosen from the first vocab_size ids as specs[i] says. Afterwards the
        cache holds all of these tokens but the last, which is not read. A NaN in a row of logits ends the generation for its read.

        The distributions are over vocab_size ids, even if the model has fewer.
        """
        return self.launch_generation(reads, lens, vocab_size, cache, specs).result.resolve()

    def launch_generation(
        self, reads: Sequence[Read], lens: Sequence[int], vocab_size: int, cache: Regions, specs: Sequence[DrawSpec]
    ) -> Generation:
        """The same, but the device may still be generating. The cache holds the tokens when the result has been resolved."""
        if not reads:
            return Generation(Pending.of(Generated([])))
        if self._generating is None or not self._generating.can_generate(specs):
            read_all = partial(self.read, cache=cache)
            return Generation(Pending.of(generate_step_by_step(read_all, reads, lens, vocab_size, specs)))
        batch = flatten(reads, cache, lens)
        self._read_sources(batch)
        generation = self._generating.generate(batch, lens, vocab_size, specs)

        def remembered(generated: Generated) -> Generated:
            for read, span, tokens in zip(reads, batch.spans, generated.ids, strict=True):
                span.region.tokens.extend([*read.tokens, *tokens[:-1]])
            return generated

        return generation._replace(result=generation.result.then(remembered))

    @property
    def can_adjust(self) -> bool:
        """Whether `generate` and `grow` apply the adjustments of specs. Otherwise specs must have none."""
        return self._generating is not None and self._generating.can_adjust

    @property
    def can_grow(self) -> bool:
        """Whether it grows trees in one call."""
        return self._growing is not None

    def grow(
        self,
        reads: Sequence[Read],
        shapes: Sequence[TreeShape],
        vocab_size: int,
        cache: Regions,
        specs: Sequence[DrawSpec],
    ) -> list[list[int]]:
        """Read, then grow a tree of shapes[i] after reads[i], chosen from the first vocab_size ids as specs[i] says: greedily or with
        shared noise. Afterwards the cache holds the tokens of the reads and nothing of the trees, but it needs room for len(shapes[i]) -
        1 more tokens. Only where `can_grow`.

        -> for each read, the token of each node, -1 for a node that was not grown
        """
        assert self._growing is not None
        batch = flatten(reads, cache, [len(shape) for shape in shapes])
        self._read_sources(batch)
        grown = self._growing.grow(batch, shapes, vocab_size, specs)
        remember(reads, batch)
        return grown
