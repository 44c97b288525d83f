"""The model card: what a model was made of, how, and what it reached."""

from __future__ import annotations

from foredraft.train.corpus import SourceFile
from foredraft.train.recipe import Data, Outcome, Recipe, Start
from foredraft.train.turns import Turns


def card(
    kind: str,
    target: str | None,
    data: Data,
    start: Start,
    recipe: Recipe,
    files: list[SourceFile],
    turns: Turns,
    outcome: Outcome,
) -> str:
    """README.md in the hub's form."""
    made_for = "A language model" if target is None else f"A draft model for `{target}`"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([] if target is None else ["tags: [speculative-decoding, draft-model]"]),
        "---",
        "",
        f"# {made_for}, made with `foredraft train {kind}`",
        "",
        f"{outcome.num_parameters / 1e6:.2f} M parameters, stored in bfloat16.",
        "",
        "## Data",
        "",
        "| file | bytes | documents | licence |",
        "|---|---|---|---|",
    ]
    for file in files:
        licence = data.licences.get(file.path.name, "not stated")
        lines.append(f"| {file.path.name} | {file.num_bytes} | {len(file.documents)} | {licence} |")
    if data.exclude:
        lines += ["", f"Kept out: the documents of {', '.join(path.name for path in data.exclude)}."]
    if recipe.generations and target is not None:
        lines += [
            "",
            f"{'Of these only beginnings, and' if recipe.only_generations else 'And'} {recipe.generations} texts that the target wrote itself.",
        ]
    lines += ["", "## Recipe", "", *_recipe(target, start, recipe, turns, outcome), "", "## What it reached", ""]
    return "\n".join([*lines, *_reached(target, outcome), ""])


def _recipe(target: str | None, start: Start, recipe: Recipe, turns: Turns, outcome: Outcome) -> list[str]:
    begun = (
        f"the weights of `{start.init}`"
        if start.init is not None
        else f"the architecture `{start.architecture}`"
        if start.architecture is not None
        else f"{start.layers} layer(s) of the target, with its embeddings, final norm and head"
    )
    temperatures = ", ".join(f"{one:g}" for one in recipe.temperatures)
    loss = (
        "next-token loss"
        if target is None
        else f"{recipe.loss} on the target's distribution at temperature {temperatures}"
    )
    rates = f"{recipe.rates.matrices:g} on matrices, " if recipe.optimiser == "muon" else ""
    seen = outcome.step * recipe.batch_size * recipe.context / 1e6
    return [
        f"* Begun from {begun}.",
        f"* Loss: {loss}.",
        f"* {outcome.step} steps of {recipe.batch_size} x {recipe.context} tokens ({seen:.1f} M, "
        f"of {turns.num_tokens / 1e6:.1f} M different ones), in {outcome.seconds / 60:.0f} minutes.",
        f"* {recipe.optimiser}: learning rate {rates}{recipe.rates.others:g} elsewhere, warm-up "
        f"{recipe.rates.warm_up:g} of the run, linear decay to 0; gradients clipped at {recipe.clip:g}; {recipe.dtype}; "
        f"seed {recipe.seed}.",
    ]


def _reached(target: str | None, outcome: Outcome) -> list[str]:
    if not outcome.history or not outcome.history[-1].loss:
        return ["Nothing was held out."]
    first, last = outcome.history[0], outcome.history[-1]
    loss, acceptance = ("loss", "probability of the text") if target is None else ("KL divergence", "acceptance")
    lines = [f"| held-out text | {loss} | {acceptance} | {acceptance} before |", "|---|---|---|---|"]
    return lines + [
        f"| {kind} | {last.loss[kind]:.3f} | {last.acceptance[kind]:.3f} | {first.acceptance[kind]:.3f} |"
        for kind in last.loss
    ]
