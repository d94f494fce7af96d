"""Former names of commands behave like the new ones, and no help or manual shows them."""

from __future__ import annotations

import click
import pytest

from agent.cli.root import cli as twine_agent
from control_plane.cli.root import main as twinectl
from wire.manual import manual

FORMER = [
    (twinectl, "image rm", "image delete"),
    (twinectl, "group remove", "group delete"),
    (twinectl, "machine remove", "machine delete"),
    (twinectl, "task story", "task events"),
    (twinectl, "restored let-go", "restored stop"),
    (twine_agent, "images", "image list"),
    (twine_agent, "image rm", "image delete"),
    (twine_agent, "credential ls", "credential list"),
    (twine_agent, "credential put", "credential create"),
    (twine_agent, "credential rm", "credential delete"),
    (twine_agent, "volume remove", "volume delete"),
]


def command(group: click.Group, words: str) -> click.Command:
    found: click.Command = group
    for word in words.split():
        assert isinstance(found, click.Group)
        found = found.commands[word]
    return found


@pytest.mark.parametrize(("program", "former", "now"), FORMER)
def test_a_former_name_runs_the_same_command_and_is_hidden(
    program: click.Group, former: str, now: str
) -> None:
    old, new = command(program, former), command(program, now)
    assert old.hidden
    assert not new.hidden
    assert (old.callback, old.params) == (new.callback, new.params)


@pytest.mark.parametrize("program", [twinectl, twine_agent])
def test_the_manual_has_no_former_name(program: click.Group) -> None:
    page = manual(program, "program", "").replace("\\-", "-")
    shown = {former for of, former, _ in FORMER if of is program and f".SS {former}" in page}
    assert shown == set()
    assert all(f".SS {now}" in page for of, _, now in FORMER if of is program)
