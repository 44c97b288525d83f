"""A decoder's first layers as a model of their own, over the same weights, keys and values (LayerSkip, arXiv:2404.16710)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from foredraft.errors import ModelError
from foredraft.kernels import WeightFormat
from foredraft.model.exits import Exit
from foredraft.model.families import family_of, form_of
from foredraft.model.language_model import Body, LanguageModel
from foredraft.model.stack import StackBody, check_adapter


@runtime_checkable
class ExitingBody(Body, Protocol):
    """A body that can stop after some of its layers."""

    def first_layers(self, num_layers: int, exit: Exit | None, weight_format: WeightFormat) -> Body:
        """A body of the first layers, over the same weights. exit: the modules that follow them; None: the final norm. weight_format: of
        the exit's own matrices. Raises ModelError for an exit that it cannot run."""


def refuse_adapter(target: LanguageModel) -> None:
    """Raises ModelError for a target whose compiled body could not run an exit with an adapter."""
    if isinstance(target.body, StackBody):
        check_adapter(target.body.form)
    elif (family := family_of(target.hf)) is not None:
        check_adapter(form_of(target.hf, family))


def first_layers(
    target: LanguageModel, num_layers: int, exit: Exit | None, weight_format: WeightFormat
) -> LanguageModel:
    """See ExitingBody. Raises ModelError for a number of layers that the target does not have, or a body that cannot stop."""
    total = int(target.hf.config.get_text_config().num_hidden_layers)
    if not 1 <= num_layers < total:
        raise ModelError(
            f"{target.traits.name} has {total} layers: an early exit must come after 1 to {total - 1} of them"
        )
    if not isinstance(target.body, ExitingBody):
        raise ModelError("early exits are not supported by the kernels on a GPU: use device='cpu', or another method")
    return LanguageModel(target.hf, target.traits, target.body.first_layers(num_layers, exit, weight_format))
