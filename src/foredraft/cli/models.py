"""The options that choose the models and the drafter, and that say how to load and run them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from typer import Option

from foredraft.cli.groups import Without
from foredraft.cli.inputs import parse_bytes, parse_seconds
from foredraft.engine.embedded_models import with_embedded_models
from foredraft.engine.methods import check_draft_server, choose_methods, names_of
from foredraft.errors import ForedraftError, shown
from foredraft.model.checkpoint import refuse_unusable
from foredraft.remote import DraftServerAccess
from foredraft.sampling import AUTO
from foredraft.settings import Settings
from foredraft.utils import arguments, startup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.llm import LLM
    from foredraft.model import LoadOptions

ThreadsOption = Annotated[int | None, Option("--num-threads", help="Threads of PyTorch's CPU kernels.")]
DtypeOption = Annotated[str, Option(help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")]

DRAFT_SERVER = ("draft_server", "draft_server_key_file", "draft_server_max_wait")
WITHOUT_DRAFTER = Without(
    "method", "exit_layer", "speculative_tokens", "min_acceptance_rate", "max_draft_memory", *DRAFT_SERVER
)
"""For commands that try several drafters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Target, draft model and drafter. An option wins over the settings file."""

    model: Annotated[
        str | None, Option("--model", help="The target: hub id, directory or GGUF file. Default: the embedded pair.")
    ] = None
    draft_model: Annotated[
        str | None,
        Option(
            "--draft-model",
            help="The draft model, or a head of the target (EAGLE, DFlash, Medusa).",
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            help="none, ngram, suffix, draft_model, pard, eagle, peagle, dflash, medusa, mtp, early_exit, remote, self-int8 or self-int4, or "
            "several joined by + to choose from. Default: what --draft-model is for, else suffix."
        ),
    ] = None
    exit_layer: Annotated[
        int | None,
        Option(
            "--exit-layer",
            help="How many of the target's first layers draft (early_exit). Not needed if --draft-model is a trained exit.",
        ),
    ] = None
    speculative_tokens: Annotated[
        str | None,
        Option(
            "--speculative-tokens",
            help="Draft tokens per step: auto drafts as many as pay off; 0 is plain decoding. Default: auto.",
        ),
    ] = None
    settings_file: Annotated[
        Path | None,
        Option("--config", metavar="FILE", help="Settings as foredraft tune writes them; options win over the file."),
    ] = None
    min_acceptance_rate: Annotated[
        float | None,
        Option("--min-acceptance-rate", help="Pause a drafter whose recent acceptance rate is below this."),
    ] = None
    max_draft_memory: Annotated[
        str | None,
        Option("--max-draft-memory", help="Pause a drafter that holds more cache memory than this, such as 512MiB."),
    ] = None
    token_tree: Annotated[
        str | None,
        Option(
            "--speculative-token-tree",
            metavar="auto|none|JSON",
            help="Whether drafters may draft trees: where that pays off (auto), never (none), or of a fixed shape, such as "
            "'[[0], [1], [0, 0]]': the two likeliest tokens, and one token after the likelier. Default: none.",
        ),
    ] = None
    heterogeneous_vocab: Annotated[
        str | None,
        Option(
            "--heterogeneous-vocab",
            metavar="auto|slem|tli|none",
            help="How to use a draft model with another vocabulary: slem re-encodes its text for the target and compares, tli lets it "
            "draft only tokens that both have, none rejects it. Default: auto, by the overlap of the vocabularies.",
        ),
    ] = None
    head_window: Annotated[
        int | None,
        Option(
            "--head-window",
            help="The most tokens that an EAGLE head sees; 0: all. Default: as in its training, if its files say so.",
        ),
    ] = None
    head_settings: Annotated[
        str | None,
        Option(
            "--head-settings",
            metavar="JSON",
            help="Settings of a head that override its files, such as '{\"norm_before_residual\": true}'. Default: settings that its "
            "files do not give are found by a trial on a short text.",
        ),
    ] = None
    draft_server: Annotated[
        str | None,
        Option(
            "--draft-server",
            metavar="ADDRESS",
            help="Draft in another process (foredraft draft-server) at this address, such as tcp://10.0.0.2:5757. Its key: "
            "FOREDRAFT_DRAFT_KEY.",
        ),
    ] = None
    draft_server_key_file: Annotated[
        Path | None, Option("--draft-server-key-file", metavar="FILE", help="The key, instead of the environment's.")
    ] = None
    draft_server_max_wait: Annotated[
        str | None,
        Option(
            "--draft-server-max-wait",
            help="The longest that a step waits for its drafts, such as 0.05s. Default: 0.1s.",
        ),
    ] = None
    adapt: Annotated[
        bool | None,
        Option("--adapt/--no-adapt", help="Let Medusa heads learn from the generated texts. Default: no."),
    ] = None
    cache_memory: Annotated[
        str | None,
        Option(
            "--cache-memory", help="Memory for the KV cache, such as 4GiB. Default: by context length and free memory."
        ),
    ] = None
    dtype: DtypeOption = "auto"
    quantization: Annotated[
        str | None,
        Option(
            help="int8 or int4 quantises the linear layers as they are loaded, the draft model's too. int4 keeps the lm_head "
            "in int8; int4-all does not. Default: none."
        ),
    ] = None
    draft_quantization: Annotated[
        str | None,
        Option(
            "--draft-quantization",
            help="For the draft model or head: int8, int4, int4-all or none. Default: as for the target; a head in int8 or int4, by "
            "its size.",
        ),
    ] = None
    device: DeviceOption = "auto"
    batch_invariant: Annotated[
        bool,
        Option("--batch-invariant", help="On a GPU: a text never depends on what it is batched with. Somewhat slower."),
    ] = False
    device_map: Annotated[
        str | None,
        Option(
            "--device-map",
            metavar="auto|JSON",
            help="Spread the target over several GPUs, as transformers does: auto, or a device for each module, such as "
            '\'{"model": 0, "lm_head": 1}\'.',
        ),
    ] = None
    tp_plan: Annotated[
        str | None,
        Option(
            "--tp-plan",
            metavar="auto",
            help="Split the target among the processes of a torchrun: torchrun --nproc-per-node 2 -m foredraft ...",
        ),
    ] = None
    revision: Annotated[str | None, Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False
    num_threads: ThreadsOption = None

    @property
    def draft_len(self) -> int | str | None:
        """`speculative_tokens`, as a number if it is one."""
        text = self.speculative_tokens
        return int(text) if text is not None and text.isdecimal() else text

    @property
    def head_values(self) -> dict[str, Any] | None:
        """`head_settings`, parsed. Raises ForedraftError unless it is a JSON object."""
        if self.head_settings is None:
            return None
        try:
            values = json.loads(self.head_settings)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ForedraftError(
                f"--head-settings must be a JSON object, such as '{{\"norm_before_residual\": true}}', not {shown(self.head_settings)}"
            )
        return values

    @property
    def token_paths(self) -> Sequence[Sequence[int]] | str | None:
        """`token_tree`, parsed. Raises ForedraftError unless it is auto, none or a list of lists of ranks."""
        if self.token_tree is None:
            return None
        try:
            tree = json.loads(self.token_tree)
        except ValueError:
            tree = self.token_tree
        return arguments.check_token_tree(tree)

    @property
    def draft_server_values(self) -> str | Mapping[str, Any] | None:
        """The draft server's address, with its key file and time limit if given. Raises ForedraftError for these without an address."""
        file, wait = self.draft_server_key_file, self.draft_server_max_wait
        if file is None and wait is None:
            return self.draft_server
        if self.draft_server is None:
            raise ForedraftError(
                "--draft-server-key-file and --draft-server-max-wait are for a draft server: give --draft-server"
            )
        given = {
            "key_file": None if file is None else str(file),
            "max_wait": None if wait is None else parse_seconds(wait),
        }
        return {"address": self.draft_server} | {name: value for name, value in given.items() if value is not None}

    @property
    def device_places(self) -> str | Mapping[str, int | str] | None:
        """`device_map`, parsed."""
        try:
            places: str | Mapping[str, int | str] = json.loads(self.device_map or "null")
        except ValueError:
            return self.device_map
        return places

    @property
    def max_draft_bytes(self) -> int | None:
        return None if self.max_draft_memory is None else parse_bytes(self.max_draft_memory)

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_memory is None else parse_bytes(self.cache_memory)

    @property
    def target(self) -> str | None:
        """The target that the options or the settings file name; None: the embedded one."""
        target: str | None = self.settings().model
        return target

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the target's configuration says that it is an encoder-decoder."""
        from foredraft.model.hub import config_of

        name = self.settings().model
        return isinstance(name, str) and bool(config_of(name, self.revision).get("is_encoder_decoder"))

    def check(self, *, has_weights: bool = True) -> None:
        """Raises ForedraftError for bad options that can be found without importing PyTorch; `load` would find them too, but later.

        has_weights: whether the weights will be loaded, and so must exist.
        """
        settings = self.settings()
        arguments.check_threads(settings.num_threads)
        arguments.check_draft_len(AUTO if settings.speculative_tokens is None else settings.speculative_tokens)
        arguments.check_numbers(
            cache_memory=(self.cache_bytes, 1),
            exit_layer=(settings.exit_layer, 1),
            max_speculative_tokens=(settings.max_speculative_tokens, 1),
        )
        if settings.speculative_token_tree is not None:
            arguments.check_token_tree(settings.speculative_token_tree)
        arguments.check_thresholds(self.min_acceptance_rate, self.max_draft_bytes)
        arguments.check_head_options(settings.head_window, settings.head_settings)
        arguments.check_heterogeneous_vocab(settings.heterogeneous_vocab)
        arguments.check_precision(self.dtype, settings.quantization, settings.draft_quantization)
        arguments.check_devices(self.device, self.device_places, self.tp_plan, settings.quantization)
        has_draft_server = DraftServerAccess.of(settings.draft_server) is not None
        methods = choose_methods(
            settings.method,
            has_draft_model=with_embedded_models(settings).draft_model is not None,
            has_exit_layer=settings.exit_layer is not None,
            has_draft_server=has_draft_server,
        )
        check_draft_server(names_of(methods), is_given=has_draft_server)
        for source in (settings.model, settings.draft_model):
            if source is not None:
                refuse_unusable(source, has_weights=has_weights)

    def for_methods(self, methods: Sequence[str]) -> Self:
        """These options with the packaged head or draft model for methods that a command tries, if one needs it and neither the options
        nor the settings file say what drafts."""
        draft = self._packaged_draft("+".join(methods)) if methods else None
        return self if draft is None else replace(self, draft_model=draft)

    def with_packaged_head(self) -> Self:
        """These options with the packaged head for the given model, and with lookups in the text, which together draft fastest; unchanged
        if there is no such head, if the options or the settings file say what drafts, and over several devices, where no head runs."""
        has_one_device = self.device_places is None and self.tp_plan is None
        head = self._packaged_draft("eagle") if self.target is not None and has_one_device else None
        return self if head is None else replace(self, draft_model=head, method="eagle+suffix")

    def _packaged_draft(self, method: str) -> str | None:
        """The packaged draft model or head for this method; None if the options or the settings file say what drafts."""
        settings = self.settings()
        drafts_already = (settings.draft_model, settings.exit_layer, settings.method, settings.draft_server)
        if any(each is not None for each in drafts_already):
            return None
        draft = with_embedded_models(settings.override(method=method)).draft_model
        return None if draft is None else str(draft)

    def load(self, **settings: Any) -> LLM:
        """settings: arguments of LLM that are not among these options."""
        self.check()
        from foredraft.cli.render.progress import spinner
        from foredraft.llm import LLM

        startup.ready()
        # local models show progress bars of their own while they load; a hub id may be downloaded first
        on_hub = [name for name in (self.model, self.draft_model) if name is not None and not Path(name).exists()]
        with spinner(f"loading {' and '.join(on_hub)}") if on_hub else nullcontext():
            return LLM(
                self.model,
                self.draft_model,
                method=self.method,
                exit_layer=self.exit_layer,
                speculative_tokens=self.draft_len,
                speculative_token_tree=self.token_paths,
                min_acceptance_rate=self.min_acceptance_rate,
                max_draft_memory=self.max_draft_bytes,
                heterogeneous_vocab=self.heterogeneous_vocab,
                head_window=self.head_window,
                head_settings=self.head_values,
                draft_server=self.draft_server_values,
                adapt=self.adapt,
                cache_memory=self.cache_bytes,
                dtype=self.dtype,
                device=self.device,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                device_map=self.device_places,
                tp_plan=self.tp_plan,
                quantization=self.quantization,
                draft_quantization=self.draft_quantization,
                batch_invariant=self.batch_invariant,
                num_threads=self.num_threads,
                config=self.settings_file,
                **settings,
            )

    def follow(self, **settings: Any) -> None:
        """In all but the first process of a torchrun: take part in the first one's passes from here on, until it ends. So only the
        first one does what a command does before it loads, such as reading standard input or opening a port. settings: as in load."""
        if self.tp_plan is not None and os.environ.get("RANK", "0") != "0":
            self.load(**settings)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer. Raises ForedraftError if it has none."""
        from foredraft.model import EMBEDDED, load_tokenizer

        return load_tokenizer(self.target or EMBEDDED / "target", self.load_options())

    def load_options(self) -> LoadOptions:
        from foredraft.model import LoadOptions

        return LoadOptions(self.dtype, self.device, self.revision, self.trust_remote_code, self.quantization)

    def settings(self) -> Settings:
        """The settings of the file, overridden by the options."""
        settings = Settings() if self.settings_file is None else Settings.read(self.settings_file)
        return settings.override(
            model=self.model,
            draft_model=self.draft_model,
            method=self.method,
            exit_layer=self.exit_layer,
            speculative_tokens=self.draft_len,
            speculative_token_tree=self.token_paths,
            quantization=self.quantization,
            draft_quantization=self.draft_quantization,
            num_threads=self.num_threads,
            heterogeneous_vocab=self.heterogeneous_vocab,
            head_window=self.head_window,
            head_settings=self.head_values,
            draft_server=self.draft_server_values,
            adapt=self.adapt,
        )


def set_threads(num_threads: int | None) -> None:
    """For commands that load no LLM. Raises ForedraftError for more threads than the machine can run."""
    arguments.check_threads(num_threads)
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
