"""`foredraft train head` as a function: from a target and texts to a head in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.heads import EagleConfig, EagleHead, TargetEnds, TargetShape, load_head
from foredraft.heads.saving import save_eagle3
from foredraft.model import LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.train.generations import GenerationSpec, generate, split_documents
from foredraft.train.head_student import default_taps, frequent_ids, new_eagle3
from foredraft.train.interrupt import stop_on_signal
from foredraft.train.model_card import Student, distilled_by, model_card
from foredraft.train.objectives import Objective
from foredraft.train.optimiser import Optimiser
from foredraft.train.recipe import Data, Outcome, Recipe
from foredraft.train.run_folder import MODEL_CARD, RunFolder
from foredraft.train.tasks import TaskRotation, make_tasks
from foredraft.train.texts import TrainingTexts
from foredraft.train.trainer import Trainer
from foredraft.train.training import Watch, arguments_of, schedule_of
from foredraft.train.unrolled_drafts import TargetStates, UnrolledDrafts

_UNWATCHED = Watch()


@dataclass(frozen=True, slots=True)
class HeadStart:
    """taps: inputs of the target's layers that the head reads; None: an early, a middle and the last. draft_vocab_size: how many
    ids it can draft; None: all. layers: of the head. num_steps, decay: see UnrolledDrafts. init: a head to train further."""

    taps: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    layers: int = 1
    num_steps: int = 5
    decay: float = 0.8
    init: str | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1 or not 0 < self.decay <= 1 or self.layers < 1:
            raise ForedraftError("--unroll and --layers must be at least 1, and --decay above 0 and at most 1")


def train_head(
    target: str, data: Data, start: HeadStart, recipe: Recipe, out: Path, watch: Watch = _UNWATCHED
) -> Outcome:
    """Trains an EAGLE-3 head for a target, on the files and on texts that the target writes; the result is in speculators' form.

    Continues an interrupted run with the same arguments. Raises ForedraftError, one line, for input that cannot be used, if
    the loss is not finite, and if the disk is full; saved checkpoints are kept.
    """
    return _HeadRun(target, data, start, recipe, out, watch).execute()


@dataclass(frozen=True, slots=True)
class _HeadRun:
    target: str
    data: Data
    start: HeadStart
    recipe: Recipe
    out: Path
    watch: Watch

    def execute(self) -> Outcome:
        self.watch.stage("reading")
        tokenizer = load_tokenizer(self.target, LoadOptions())
        texts = TrainingTexts.read(self.data, tokenizer, self.recipe.context)
        folder = RunFolder(self.out)
        arguments = {
            "command": "head",
            "target": self.target,
            **arguments_of(self.data, self.start, self.recipe, texts.files),
        }
        folder.check_arguments(arguments)
        folder.begin(arguments)
        generated = self._generated(texts.documents, tokenizer.bos_token_id)
        self.watch.stage("loading")
        target = load_model(self.target, LoadOptions(device="cpu"))
        target.take_over()
        head = self._head(target, folder, [*texts.documents, *generated])
        objectives, served = self._objectives(target, head)
        documents = [] if self.recipe.only_generations else texts.documents
        tasks = make_tasks(documents, generated, objectives, self.recipe.context, tokenizer.eos_token_id)
        trainer = self._trainer(head, target, tasks, served, texts, folder)
        trainer.resume()
        self.watch.stage("training")
        with stop_on_signal() as should_stop:
            complete = trainer.run(self.watch.step, should_stop)
        outcome = Outcome(complete, trainer.step, trainer.seconds, _num_parameters(head), trainer.history)
        if complete:
            card = model_card(
                self._card_of(head), self.target, self.data, self.recipe, texts.files, tasks.num_tokens, outcome
            )
            folder.publish(partial(self._publish, head, target, card))
        return outcome

    def _generated(self, documents: list[list[int]], first_id: int | None) -> list[list[int]]:
        recipe = self.recipe
        if not recipe.generations:
            return []
        self.watch.stage("the target writes")
        prompt_len, max_tokens = max(1, min(32, recipe.context // 4)), min(224, recipe.context // 2)
        spec = GenerationSpec(recipe.generations, recipe.temperatures, prompt_len, max_tokens, recipe.seed)
        pieces = split_documents(documents, recipe.context, first_id)
        return generate(self.target, pieces, spec, self.out, self.watch.share)

    def _head(self, target: LanguageModel, folder: RunFolder, texts: list[list[int]]) -> EagleHead:
        """From the last checkpoint, from a head that is given, or new. In float32."""
        source = str(folder.checkpoints[-1]) if folder.checkpoints else self.start.init
        if source is None:
            config = target.hf.config.get_text_config()
            size = self.start.draft_vocab_size or int(config.vocab_size)
            ids = frequent_ids(texts, size, int(config.vocab_size))
            taps = self.start.taps or default_taps(int(config.num_hidden_layers))
            return new_eagle3(target, taps, ids, self.recipe.seed, self.start.layers)
        checkpoint, ends = load_head(source, TargetShape.of(target.hf.config)), TargetEnds(target.hf)
        if not isinstance(checkpoint.config, EagleConfig) or not checkpoint.config.owns_lm_head:
            raise ForedraftError(f"{source}: an EAGLE-3 head with an lm_head of its own is needed")
        return EagleHead.of(checkpoint, ends.embed, ends.lm_head).requires_grad_(True)

    def _objectives(self, target: LanguageModel, head: EagleHead) -> tuple[list[Objective], Objective]:
        """One for each served temperature, and what validation measures."""
        states = TargetStates(target, head.config.taps)
        rows = TargetEnds(target.hf).lm_head_rows(head.config.target_ids)
        made = [self._objective(states, rows, self.recipe.loss, t) for t in self.recipe.temperatures]
        return list(made), self._objective(states, rows, "kl", max(self.recipe.temperatures))

    def _objective(self, states: TargetStates, rows: Tensor, loss: str, temperature: float) -> UnrolledDrafts:
        start = self.start
        return UnrolledDrafts(
            states, rows, start.num_steps, start.decay, loss, temperature or 0.25, self.recipe.kl_until
        )

    def _trainer(
        self,
        head: EagleHead,
        target: LanguageModel,
        tasks: TaskRotation,
        served: Objective,
        texts: TrainingTexts,
        folder: RunFolder,
    ) -> Trainer:
        return Trainer(
            head,
            head.config.draft_vocab_size * self.start.num_steps,
            partial(self._save, head, target),
            Optimiser(head, self.recipe.optimiser, self.recipe.rates, self.recipe.clip),
            tasks,
            served,
            texts.validation,
            schedule_of(self.recipe, tasks),
            folder,
        )

    def _publish(self, head: EagleHead, target: LanguageModel, card: str, folder: Path) -> None:
        """In bfloat16, as it will be served. The float32 weights stay in the last checkpoint."""
        self._save(head, target, folder, torch.bfloat16)
        (folder / MODEL_CARD).write_text(card, encoding="utf-8")

    def _card_of(self, head: EagleHead) -> Student:
        config, start = head.config, self.start
        reads = ", ".join(str(tap) for tap in config.taps)
        origin = (
            "random weights in the target's widths, with rows of its lm_head"
            if start.init is None
            else f"`{start.init}`"
        )
        return Student(
            "head",
            f"An EAGLE-3 head for `{self.target}`",
            f"{origin}; it reads the inputs of the layers {reads}, and drafts {config.draft_vocab_size} of {config.vocab_size} ids",
            ("tags: [speculative-decoding, eagle3]",),
            f"{distilled_by(self.recipe)}, {start.num_steps} drafted tokens deep (test-time training, arXiv:2503.01840), each "
            f"weighing {start.decay:g} of the one before",
        )

    def _save(self, head: EagleHead, target: LanguageModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        architectures: list[Any] = target.hf.config.architectures or [type(target.hf).__name__]
        save_eagle3(head, folder, self.target, architectures, dtype)


def _num_parameters(head: EagleHead) -> int:
    return sum(parameter.numel() for parameter in head.parameters())
