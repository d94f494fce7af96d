"""`twinectl role`, `group` and `whoami`."""

from __future__ import annotations

import click

from control_plane.api.people import Grant, Grants, Group, Groups, GroupSpec, Myself
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option


def principal_of(who: str) -> str:
    """Return `user:NAME` or `group:NAME`; a name alone is a user's."""
    return who if ":" in who else f"user:{who}"


@click.group()
def role() -> None:
    """Who is an operator. Owners are named by entitlements, everybody else is a viewer."""


@role.command("list")
@output_option
@click.pass_obj
def role_list(target: Target, output: str) -> None:
    """Show the operators."""
    found: Grants = target.ask(lambda client: client.list_operators())
    rows = [(who, "operator", "the configuration", "-") for who in found.configured]
    rows += [(g.who, g.role.value, g.by, show.ago(g.at)) for g in found.granted]
    show.emit(output, found, lambda: show.table(("who", "role", "granted by", "age"), rows))


@role.command("grant")
@click.argument("who")
@click.argument("role_", metavar="ROLE", type=click.Choice(["operator"]))
@output_option
@click.pass_obj
def role_grant(target: Target, who: str, role_: str, output: str) -> None:
    """Make WHO (user:NAME, group:NAME, or a user's name) an operator."""
    found: Grant = target.ask(lambda client: client.grant_operator(principal_of(who)))
    line = f"{found.who} is an {role_}"
    show.emit(output, found, lambda: click.echo(show.printable(line)))


@role.command("revoke")
@click.argument("who")
@click.argument("role_", metavar="ROLE", type=click.Choice(["operator"]))
@output_option
@click.pass_obj
def role_revoke(target: Target, who: str, role_: str, output: str) -> None:
    """Make WHO an operator no longer, from the next request on."""
    name = principal_of(who)
    target.ask(lambda client: client.revoke_operator(name))
    line = f"{name} is no {role_} any more"
    show.emit(output, {"revoked": name}, lambda: click.echo(show.printable(line)))


@click.group()
def group() -> None:
    """Groups of users, which can own entitlements or be operators."""


@group.command("list")
@output_option
@click.pass_obj
def group_list(target: Target, output: str) -> None:
    """Show all groups and their members."""
    found: Groups = target.ask(lambda client: client.list_groups())
    rows = [(g.name, ", ".join(g.members) or "-") for g in found.groups]
    show.emit(output, found, lambda: show.table(("group", "members"), rows))


@group.command("set")
@click.argument("name")
@click.argument("members", nargs=-1)
@output_option
@click.pass_obj
def group_set(target: Target, name: str, members: tuple[str, ...], output: str) -> None:
    """Say who belongs to group NAME: exactly these users."""
    spec = GroupSpec(members=list(members))
    found: Group = target.ask(lambda client: client.put_group(name, spec))
    line = f"group {found.name}: {', '.join(found.members) or 'nobody'}"
    show.emit(output, found, lambda: click.echo(show.printable(line)))


@group.command("remove")
@click.argument("name")
@output_option
@click.pass_obj
def group_remove(target: Target, name: str, output: str) -> None:
    """Remove a group; what names it is not changed, but it names nobody then."""
    target.ask(lambda client: client.delete_group(name))
    line = f"group {name}: removed"
    show.emit(output, {"removed": name}, lambda: click.echo(show.printable(line)))


@click.command()
@output_option
@click.pass_obj
def whoami(target: Target, output: str) -> None:
    """Show who you are to the front end, and what you may do."""
    found: Myself = target.ask(lambda client: client.get_myself())
    rows = [
        ("role", found.role.value),
        ("groups", ", ".join(found.groups) or "-"),
        ("owns", ", ".join(found.owns) or "-"),
    ]
    show.emit(output, found, lambda: show.table(("name", found.name), rows))
