"""The model card: data, recipe and results of a run."""

from __future__ import annotations

from foredraft.train.corpus import SourceFile
from foredraft.train.recipe import Data, Outcome, Recipe, Start


def model_card(
    command: str,
    target: str | None,
    data: Data,
    start: Start,
    recipe: Recipe,
    files: list[SourceFile],
    num_tokens: int,
    outcome: Outcome,
) -> str:
    """A README.md in the Hugging Face hub's format. num_tokens: different ones to train on."""
    title = "A language model" if target is None else f"A draft model for `{target}`"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([] if target is None else ["tags: [speculative-decoding, draft-model]"]),
        "---",
        "",
        f"# {title}, made with `foredraft train {command}`",
        "",
        f"{outcome.num_parameters / 1e6:.2f} M parameters, stored in bfloat16.",
        "",
        "## Data",
        "",
        *_data(target, data, recipe, files),
    ]
    lines += ["", "## Recipe", "", *_recipe(target, start, recipe, num_tokens, outcome), "", "## What it reached", ""]
    return "\n".join([*lines, *_results(target, outcome), ""])


def _data(target: str | None, data: Data, recipe: Recipe, files: list[SourceFile]) -> list[str]:
    lines = ["| file | bytes | documents | licence |", "|---|---|---|---|"]
    for file in files:
        licence = data.licences.get(file.path.name, "not stated")
        lines.append(f"| {file.path.name} | {file.num_bytes} | {len(file.documents)} | {licence} |")
    if data.exclude:
        lines += ["", f"Kept out: the documents of {', '.join(path.name for path in data.exclude)}."]
    if recipe.generations and target is not None:
        which = "Of these only beginnings, and" if recipe.only_generations else "And"
        lines += ["", f"{which} {recipe.generations} texts that the target wrote itself."]
    return lines


def _recipe(target: str | None, start: Start, recipe: Recipe, num_tokens: int, outcome: Outcome) -> list[str]:
    origin = (
        f"the weights of `{start.init}`"
        if start.init is not None
        else f"the architecture `{start.architecture}`"
        if start.architecture is not None
        else f"{start.layers} layer(s) of the target, with its embeddings, final norm and head"
    )
    temperatures = ", ".join(f"{temperature:g}" for temperature in recipe.temperatures)
    loss = (
        "next-token loss"
        if target is None
        else f"{recipe.loss} on the target's distribution at temperature {temperatures}"
    )
    rates = f"{recipe.rates.matrices:g} on matrices, " if recipe.optimiser == "muon" else ""
    seen = outcome.step * recipe.batch_size * recipe.context / 1e6
    return [
        f"* Begun from {origin}.",
        f"* Loss: {loss}.",
        f"* {outcome.step} steps of {recipe.batch_size} x {recipe.context} tokens ({seen:.1f} M, "
        f"of {num_tokens / 1e6:.1f} M different ones), in {outcome.seconds / 60:.0f} minutes.",
        f"* {recipe.optimiser}: learning rate {rates}{recipe.rates.others:g} elsewhere, warm-up "
        f"{recipe.rates.warm_up:g} of the run, linear decay to 0; gradients clipped at {recipe.clip:g}; {recipe.dtype}; "
        f"seed {recipe.seed}.",
    ]


def _results(target: str | None, outcome: Outcome) -> list[str]:
    if not outcome.history or not outcome.history[-1].loss:
        return ["Nothing was held out."]
    first, last = outcome.history[0], outcome.history[-1]
    loss, acceptance = ("loss", "probability of the text") if target is None else ("KL divergence", "acceptance")
    lines = [f"| held-out text | {loss} | {acceptance} | {acceptance} before |", "|---|---|---|---|"]
    return lines + [
        f"| {kind} | {last.loss[kind]:.3f} | {last.acceptance[kind]:.3f} | {first.acceptance[kind]:.3f} |"
        for kind in last.loss
    ]
