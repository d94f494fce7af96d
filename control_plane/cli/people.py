"""`twinectl role`, `group` and `whoami`."""

from __future__ import annotations

import time

import click

from control_plane.api.people import GroupSpec, Role
from control_plane.cli import show
from control_plane.cli.machines import machine
from control_plane.cli.program import Target, shows_answer
from wire.options import former_names


def principal_of(who: str) -> str:
    """Return `user:NAME` or `group:NAME`; a name alone is a user's."""
    return who if ":" in who else f"user:{who}"


_ADMIN = Role.HOST_ADMIN.value
_ROLES = {Role.OPERATOR.value: "an operator", _ADMIN: "a host admin"}
"""Roles that can be granted → their names in messages."""


@click.group()
def role() -> None:
    """List and change operators and host admins.

    Owners are named by entitlements; every other user is a viewer.
    """


@role.command("list")
@shows_answer
def role_list(target: Target, output: str) -> None:
    """Show operators and host admins."""
    found = target.ask(lambda client: client.list_operators())
    rows = [(who, "operator", "the configuration", "-") for who in found.configured]
    rows += [(g.who, g.role.value, g.by, show.ago(g.at)) for g in found.granted]
    show.emit(output, found, lambda: show.table(("who", "role", "granted by", "age"), rows))


@role.command("grant")
@click.argument("who", metavar="PRINCIPAL")
@click.argument("role_", metavar="ROLE", type=click.Choice(_ROLES))
@shows_answer
def role_grant(target: Target, who: str, role_: str, output: str) -> None:
    """Grant PRINCIPAL (user:NAME, group:NAME, or a user's name) the role of operator or host admin.

    An operator may do everything except run tasks without a sandbox (`raw`). A host admin may run
    such tasks, in jobs that they may change.
    """
    name = principal_of(who)
    found = target.ask(
        lambda client: (
            client.grant_host_admin(name) if role_ == _ADMIN else client.grant_operator(name)
        )
    )
    line = f"{found.who} is {_ROLES[role_]}"
    show.emit(output, found, lambda: show.lines(line))


@role.command("revoke")
@click.argument("who", metavar="PRINCIPAL")
@click.argument("role_", metavar="ROLE", type=click.Choice(_ROLES))
@shows_answer
def role_revoke(target: Target, who: str, role_: str, output: str) -> None:
    """Revoke the role of operator or host admin from PRINCIPAL, from the next request on."""
    name = principal_of(who)
    target.ask(
        lambda client: (
            client.revoke_host_admin(name) if role_ == _ADMIN else client.revoke_operator(name)
        )
    )
    line = f"{name} no longer has the role {role_}"
    show.emit(output, {"revoked": name}, lambda: show.lines(line))


@click.group()
def group() -> None:
    """Groups of users, which can own entitlements or be operators."""


@group.command("list")
@shows_answer
def group_list(target: Target, output: str) -> None:
    """Show all groups and their members."""
    found = target.ask(lambda client: client.list_groups())
    rows = [(g.name, ", ".join(g.members) or "-") for g in found.groups]
    show.emit(output, found, lambda: show.table(("group", "members"), rows))


@group.command("set")
@click.argument("name")
@click.argument("members", nargs=-1)
@shows_answer
def group_set(target: Target, name: str, members: tuple[str, ...], output: str) -> None:
    """Set the members of group NAME: exactly these users."""
    spec = GroupSpec(members=list(members))
    found = target.ask(lambda client: client.put_group(name, spec))
    line = f"group {found.name}: {', '.join(found.members) or 'no members'}"
    show.emit(output, found, lambda: show.lines(line))


@former_names(group, "remove")
@group.command("delete")
@click.argument("name")
@shows_answer
def group_remove(target: Target, name: str, output: str) -> None:
    """Remove a group; objects that name it are not changed, and the name has no effect then."""
    target.ask(lambda client: client.delete_group(name))
    line = f"group {name}: removed"
    show.emit(output, {"removed": name}, lambda: show.lines(line))


@click.group()
def user() -> None:
    """Users with a credential. `twine-control-plane user add` writes one."""


@user.command("list")
@shows_answer
def user_list(target: Target, output: str) -> None:
    """Show the users with a credential, until when it is valid, and which are revoked."""
    found = target.ask(lambda client: client.list_users())
    rows = [
        (
            one.name,
            "-" if one.issued_at is None else show.ago(one.issued_at),
            "-" if one.not_after is None else f"in {show.duration(one.not_after - time.time())}",
            "-" if one.revoked_at is None else show.ago(one.revoked_at),
        )
        for one in found.users
    ]
    show.emit(output, found, lambda: show.table(("user", "issued", "ends", "revoked"), rows))


@user.command("revoke")
@click.argument("name")
@shows_answer
def user_revoke(target: Target, name: str, output: str) -> None:
    """Revoke all present credentials of NAME; later ones are valid."""
    found = target.ask(lambda client: client.revoke_user(name))
    line = f"user {found.name}: all present credentials are revoked"
    show.emit(output, found, lambda: show.lines(line))


@machine.command("revoke-identity")
@click.argument("name")
@shows_answer
def machine_revoke_identity(target: Target, name: str, output: str) -> None:
    """Revoke all present certificates of machine NAME: its host has to join again."""
    found = target.ask(lambda client: client.revoke_machine_identity(name))
    line = f"machine {found.name}: its certificates are revoked"
    hint = f"to restore it: twinectl token create --host {found.name}"
    show.emit(output, found, lambda: click.echo("\n".join(map(show.printable, (line, hint)))))


@click.command()
@shows_answer
def whoami(target: Target, output: str) -> None:
    """Show your name, as the front end sees it, and your rights."""
    found = target.ask(lambda client: client.get_current_user())
    rows = [
        ("name", found.name),
        ("role", found.role.value),
        ("groups", ", ".join(found.groups) or "-"),
        ("owns", ", ".join(found.owns) or "-"),
        ("host admin", "yes" if found.host_admin else "no"),
    ]
    show.emit(output, found, lambda: show.table(("what", "value"), rows))
