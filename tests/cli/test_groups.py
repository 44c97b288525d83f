"""Dataclasses of options that are expanded into a command's signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from foredraft.cli.groups import Without, option_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    size: Annotated[int, typer.Option("--size", min=1, help="How large.")] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Base):
    place: Annotated[str, typer.Option(help="Where.")]
    size: Annotated[int, typer.Option("--size", help="Another default.")] = 7


def run(command: Any, *args: str) -> Any:
    app = typer.Typer()
    app.command()(option_groups(command))
    return CliRunner().invoke(app, args)


def show(group: Group, flag: Annotated[bool, typer.Option("--flag")] = False) -> None:
    """Show."""
    typer.echo(f"{group} {flag}")


def show_less(group: Annotated[Base, Without("names")], more: Annotated[int, typer.Option()] = 0) -> None:
    typer.echo(f"{group} {more}")


def test_each_field_is_an_option() -> None:
    result = run(show, "--place", "here", "--name", "a", "--name", "b", "--flag")
    assert result.exit_code == 0, result.output
    assert result.output == f"{Group(place='here', names=['a', 'b'])} True\n"


def test_a_subclass_may_change_a_default_and_keeps_the_order() -> None:
    result = run(show, "--place", "here")
    assert result.output == f"{Group(place='here', size=7)} False\n"
    shown = run(show, "--help").output
    assert shown.index("--size") < shown.index("--name") < shown.index("--place") < shown.index("--flag")
    assert "Another default." in shown


def test_a_field_without_default_is_required() -> None:
    result = run(show)
    assert result.exit_code == 2
    assert "--place" in result.output


def test_the_range_of_an_option_is_checked() -> None:
    result = run(show_less, "--size", "0")
    assert result.exit_code == 2
    assert "--size" in result.output


def test_an_excluded_field_is_no_option_and_keeps_its_default() -> None:
    assert run(show_less, "--size", "2", "--more", "1").output == f"{Base(size=2)} 1\n"
    assert run(show_less, "--name", "a").exit_code == 2


def test_two_groups_with_a_field_of_the_same_name_are_refused() -> None:
    def twice(first: Base, second: Base) -> None: ...

    twice.__annotations__ = {"first": Base, "second": Base}
    with pytest.raises(ValueError, match="duplicate parameter"):
        option_groups(twice)


def test_a_nonexistent_field_cannot_be_excluded() -> None:
    def wrong(group: object) -> None: ...

    wrong.__annotations__ = {"group": Annotated[Base, Without("nothing")]}
    with pytest.raises(ValueError, match="nothing"):
        option_groups(wrong)
