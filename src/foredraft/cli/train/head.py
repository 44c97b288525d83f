"""foredraft train head"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from typer import Option

from foredraft.cli.groups import option_groups
from foredraft.cli.options import JsonOption
from foredraft.cli.train.app import train
from foredraft.cli.train.make import check_inputs, report, watching
from foredraft.cli.train.options import DataOptions, DistillationOptions, DocumentOptions, OutOption, RecipeOptions
from foredraft.errors import ForedraftError


class _Kind(NamedTuple):
    """name: of the class in foredraft.train. fields: its fields that options set. needed: fields that must be given."""

    name: str
    fields: tuple[str, ...]
    needed: tuple[str, ...] = ()


_BLOCK = ("taps", "layers", "intermediate_size", "block_size", "mask_token", "anchor_every", "decay")
_EAGLE3 = ("taps", "draft_vocab_size", "layers", "intermediate_size", "shares_lm_head", "num_steps", "decay")
_KINDS = {
    "eagle3": _Kind("Eagle3Kind", _EAGLE3),
    "eagle1": _Kind("Eagle1Kind", ("draft_model", "taps", "num_steps", "decay")),
    "medusa": _Kind("MedusaKind", ("num_heads", "layers", "draft_vocab_size", "own_lm_heads", "decay")),
    "dflash": _Kind("DFlashKind", _BLOCK),
    "dspark": _Kind("DSparkKind", (*_BLOCK, "markov_rank", "markov_kind")),
    "exit": _Kind("ExitKind", ("exit_layer", "adapter_size"), ("exit_layer",)),
    "decoder": _Kind("DecoderKind", ("layers",)),
}
_FLAGS = {"num_steps": "--unroll", "num_heads": "--heads", "shares_lm_head": "--share-lm-head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKindOptions:
    """Options of particular kinds of heads: fields of their classes in foredraft.train."""

    taps: Annotated[
        list[int] | None,
        Option(
            help="EAGLE-1, EAGLE-3, DFlash, DSpark: a layer whose input the head reads; repeatable. Default: three of them."
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None, Option("--draft-vocab-size", help="Draft only this many ids, the most frequent ones. Default: all.")
    ] = None
    layers: Annotated[
        int | None, Option(help="Layers of a head or decoder, or blocks of each Medusa head. Default: 1.")
    ] = None
    intermediate_size: Annotated[
        int | None,
        Option(
            "--intermediate-size", help="EAGLE-3, DFlash, DSpark: the size of the head's MLP. Default: the target's."
        ),
    ] = None
    shares_lm_head: Annotated[
        bool, Option("--share-lm-head", help="EAGLE-3: keep the target's lm_head: a smaller file, and less to learn.")
    ] = False
    num_steps: Annotated[
        int | None,
        Option("--unroll", help="EAGLE-1, EAGLE-3: over how many draft tokens the loss is unrolled. Default: 5."),
    ] = None
    draft_model: Annotated[
        str | None,
        Option("--draft-model", help="EAGLE-1: a draft model with the target's tokenizer, from which the head starts."),
    ] = None
    num_heads: Annotated[
        int | None, Option("--heads", help="Medusa: the number of heads, each for one more draft token. Default: 4.")
    ] = None
    own_lm_heads: Annotated[
        bool, Option("--own-lm-heads", help="Medusa: an lm_head for each head, instead of a shared one.")
    ] = False
    decay: Annotated[
        float | None, Option(help="The weight of a draft token relative to the one before it. Default: 0.8.")
    ] = None
    block_size: Annotated[
        int | None,
        Option("--block-size", help="DFlash, DSpark: rows of a block. DFlash drafts one token fewer. Default: 8."),
    ] = None
    mask_token: Annotated[
        int | None,
        Option(
            "--mask-token", help="DFlash, DSpark: the mask token's id. Default: the least frequent id in the texts."
        ),
    ] = None
    anchor_every: Annotated[
        int | None,
        Option("--anchor-every", help="DFlash, DSpark: tokens of a text per draft that is trained. Default: 4."),
    ] = None
    markov_rank: Annotated[
        int | None, Option("--markov-rank", help="DSpark: the rank of its correction. Default: 64.")
    ] = None
    markov_kind: Annotated[
        str | None, Option("--markov-kind", help="DSpark: vanilla, gated or rnn. Default: vanilla.")
    ] = None
    exit_layer: Annotated[
        int | None, Option("--exit-layer", help="How many of the target's layers an early exit runs.")
    ] = None
    adapter_size: Annotated[
        int | None,
        Option("--adapter-size", help="The width of an exit's adapter; 0: only a norm. Default: the target's width."),
    ] = None

    def of(self, kind: str) -> dict[str, Any]:
        """The given options. Raises ForedraftError for one that this kind does not have, and if one that it needs is missing."""
        if kind == "pard":
            raise ForedraftError(
                "--kind pard: PARD is an ordinary draft model: foredraft train distill --parallel-tokens N trains one"
            )
        if kind not in _KINDS:
            raise ForedraftError(f"--kind must be one of {', '.join(_KINDS)}, not {kind!r}")
        given = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        unusable = next((name for name in given if name not in _KINDS[kind].fields), None)
        missing = next((name for name in _KINDS[kind].needed if name not in given), None)
        if unusable is not None:
            raise ForedraftError(f"{_flag(unusable)} does not apply to --kind {kind}: leave it out")
        if missing is not None:
            raise ForedraftError(f"--kind {kind} needs {_flag(missing)}")
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


@train.command()
@option_groups
def head(
    target: Annotated[str, Option(help="The model to draft for: hub id, directory or GGUF file.")],
    out: OutOption,
    data: DataOptions,
    documents: DocumentOptions,
    distillation: DistillationOptions,
    recipe: RecipeOptions,
    options: HeadKindOptions,
    kind: Annotated[
        str,
        Option(
            help="What to train: eagle3, eagle1 (from a draft model), medusa, dflash, dspark, exit (an early exit), or decoder (on an "
            "encoder-decoder's own encoder)."
        ),
    ] = "eagle3",
    init: Annotated[str | None, Option(help="A head of this kind and target to train further.")] = None,
    quantization: Annotated[
        str | None, Option(help="int8: store the finished head in eight bits, in half the space. Default: bfloat16.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a head for a target, which drafts from the target's own hidden states.

    Run the same command again to continue an interrupted run.
    docs/guides/heads.md explains what a head is, and what --out contains.
    """
    given = options.of(kind)
    check_inputs(data, recipe, None, target, init)
    from foredraft import train as training

    head_kind = getattr(training, _KINDS[kind].name)(**given, init=init)
    with watching() as watch:
        settings = recipe.recipe(is_new=init is None and options.draft_model is None, **distillation.recipe_fields())
        outcome = training.train_head(target, data.of(documents), head_kind, settings, out, watch, quantization)
    report(outcome, out, as_json)


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")
