"""Groups of options: a command takes a dataclass, and each field of it becomes an option."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_args, get_type_hints


class Without:
    """`Annotated[Group, Without("field", ...)]`: the command has no option for these fields; they keep their defaults."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)


def option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer one option for each field of the command's dataclasses; call the command with their instances.

    A field is annotated as a parameter would be: `Annotated[type, typer.Option(...)]`. Options appear in `--help` in the
    order of the parameters, and of the fields within a group.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    options: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        group, omitted = _group(parameter.annotation)
        expanded = [parameter] if group is None else list(_options(group, omitted))
        if group is not None:
            groups[parameter.name] = group, [option.name for option in expanded]
        options += [option.replace(kind=Parameter.KEYWORD_ONLY) for option in expanded]

    @wraps(command)
    def call(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{option: given.pop(option) for option in names})
        command(**given)

    call.__signature__ = Signature(options)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call


def _group(annotation: Any) -> tuple[type | None, frozenset[str]]:
    """The dataclass of a parameter, if it is one, and the fields that the command omits."""
    base, *metadata = get_args(annotation) or (annotation,)
    if not (isinstance(base, type) and is_dataclass(base)):
        return None, frozenset()
    return base, frozenset().union(*(item.names for item in metadata if isinstance(item, Without)))


def _options(group: type, omitted: frozenset[str]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    if unknown := omitted - hints.keys():
        raise ValueError(f"{group.__name__} has no field {', '.join(unknown)}")
    for field in fields(group):
        if field.name not in omitted:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
