"""Writes the model card: data, recipe and results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foredraft.train.corpus import SourceFile
from foredraft.train.recipe import Data, Outcome, Recipe, Start


class Student(NamedTuple):
    """What a card says about the trained student. command: of foredraft train. title: what it is. origin: what training began
    from. front_matter: lines of YAML. loss: what was minimised."""

    command: str
    title: str
    origin: str
    front_matter: tuple[str, ...]
    loss: str


def language_model(command: str, target: str | None, start: Start, recipe: Recipe, *, of_pairs: bool) -> Student:
    """The description of a language model, or of a draft for a target. of_pairs: whether it is an encoder-decoder."""
    library = ("library_name: transformers", f"pipeline_tag: {'text2text' if of_pairs else 'text'}-generation")
    if target is None:
        return Student(command, "A language model", _origin(start), library, "next-token loss")
    tags = "tags: [speculative-decoding, draft-model]"
    loss = distilled_by(recipe)
    if start.parallel_tokens is not None:
        loss += (
            f", at each of the {start.parallel_tokens} positions that it drafts in one pass by means of mask tokens, with "
            "conditional drop (PARD, arXiv:2504.18583)"
        )
    return Student(command, f"A draft model for `{target}`", _origin(start), (*library, tags), loss)


def distilled_by(recipe: Recipe) -> str:
    """The loss in words."""
    temperatures = ", ".join(f"{temperature:g}" for temperature in recipe.temperatures)
    return f"{recipe.loss} on the target's distribution at temperature {temperatures}"


def model_card(
    student: Student,
    target: str | None,
    data: Data,
    recipe: Recipe,
    files: Sequence[SourceFile[Any]],
    num_tokens: int,
    outcome: Outcome,
    stored_in: str = "bfloat16",
) -> str:
    """A README.md in the Hugging Face hub's format. num_tokens: distinct tokens to train on. stored_in: the format of the matrices."""
    lines = [
        "---",
        *student.front_matter,
        "---",
        "",
        f"# {student.title}, made with `foredraft train {student.command}`",
        "",
        f"{outcome.num_parameters / 1e6:.2f} M parameters, stored in {stored_in}.",
        "",
        "## Data",
        "",
        *_data(target, data, recipe, files),
    ]
    lines += ["", "## Recipe", "", *_recipe(student, data, recipe, num_tokens, outcome), "", "## Results", ""]
    return "\n".join([*lines, *_results(target, outcome), *_curve(target, data, recipe, outcome), ""])


def _data(target: str | None, data: Data, recipe: Recipe, files: Sequence[SourceFile[Any]]) -> list[str]:
    lines = (
        [f"| file | bytes | {'pairs' if data.are_pairs else 'documents'} | licence |", "|---|---|---|---|"]
        if files
        else []
    )
    for file in files:
        licence = data.licences.get(file.path.name, "not stated")
        lines.append(f"| {file.path.name} | {file.num_bytes} | {len(file.documents)} | {licence} |")
    if data.exclude:
        lines += ["", f"Excluded: the documents of {', '.join(path.name for path in data.exclude)}."]
    if recipe.generations and target is not None:
        which = (
            "Training used only beginnings of these documents, and" if recipe.only_generations else "Training also used"
        )
        lines += ["", f"{which} {recipe.generations} texts that the target wrote itself."]
    if recipe.chats and target is not None:
        names = ", ".join(path.name for path in recipe.prompts)
        origin = f"answers to the questions in {names}" if names else "questions and answers"
        lines += ["", f"{recipe.chats} conversations that the target wrote: {origin}."]
    return lines


def _origin(start: Start) -> str:
    if start.init is not None:
        return f"the weights of `{start.init}`"
    if start.architecture is not None:
        return f"the architecture `{start.architecture}`"
    return f"{start.layers} layer(s) of the target, with its embeddings, final norm and head"


def _recipe(student: Student, data: Data, recipe: Recipe, num_tokens: int, outcome: Outcome) -> list[str]:
    rates = f"{recipe.rates.matrices:g} on matrices, " if recipe.optimiser == "muon" else ""
    seen, size = _amount_read(data, recipe, outcome.step), f"{recipe.batch_size} x {recipe.context} tokens"
    if data.are_pairs:
        size = f"{recipe.batch_size} pairs"
    return [
        f"* Initialised from {student.origin}.",
        f"* Loss: {student.loss}.",
        f"* {outcome.step} steps of {size} ({seen} {_unit(data)}; {num_tokens / 1e6:.1f} M different tokens to predict), in "
        f"{outcome.seconds / 60:.0f} minutes.",
        f"* {recipe.optimiser}: learning rate {rates}{recipe.rates.others:g} elsewhere, warm-up over "
        f"{recipe.rates.warm_up:g} of the run, linear decay to 0; gradients clipped at {recipe.clip:g}; {recipe.dtype}; "
        f"seed {recipe.seed}.",
    ]


def _results(target: str | None, outcome: Outcome) -> list[str]:
    if not outcome.history or not outcome.history[-1].loss:
        return ["No text was held out for validation."]
    first, last = outcome.history[0], outcome.history[-1]
    loss, acceptance = ("loss", "probability of the text") if target is None else ("KL divergence", "acceptance")
    lines = [f"| held-out text | {loss} | {acceptance} | {acceptance} before |", "|---|---|---|---|"]
    return lines + [
        f"| {kind} | {last.loss[kind]:.3f} | {last.acceptance[kind]:.3f} | {first.acceptance[kind]:.3f} |"
        for kind in last.loss
    ]


def _curve(target: str | None, data: Data, recipe: Recipe, outcome: Outcome) -> list[str]:
    """The acceptance by amount of data read, which shows what more data would gain."""
    if not outcome.history or not outcome.history[-1].loss:
        return []
    kinds = list(outcome.history[-1].loss)
    measured = "Probability of the text" if target is None else "Acceptance"
    return [
        "",
        f"{measured} by amount of data read ({_unit(data)}):",
        "",
        f"| {_unit(data)} | {' | '.join(kinds)} |",
        "|---" * (1 + len(kinds)) + "|",
        *(
            f"| {_amount_read(data, recipe, record.step)} | {' | '.join(f'{record.acceptance[kind]:.3f}' for kind in kinds)} |"
            for record in outcome.history
        ),
    ]


def _unit(data: Data) -> str:
    return "thousand pairs" if data.are_pairs else "million tokens"


def _amount_read(data: Data, recipe: Recipe, step: int) -> str:
    """See _unit."""
    num_blocks = step * recipe.batch_size
    return f"{num_blocks / 1e3 if data.are_pairs else num_blocks * recipe.context / 1e6:.1f}"
