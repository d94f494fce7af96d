"""Credentials of users, controllers and shards: `twine-control-plane user | controller | …`."""

from __future__ import annotations

from pathlib import Path

import click

from control_plane.commands import configured
from control_plane.config import Config
from control_plane.process import url_of
from wire.errors import ConfigError, InvalidInput
from wire.options import seconds

USER_LIFE_MAX_S = 90 * 86_400.0
_HOSTS = click.option(
    "--host", "hosts", multiple=True, required=True, help="Host at which it serves; repeat."
)
_OUT = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600."
)
_TTL = click.option("--ttl", type=seconds(), default="30d", show_default=True, help="8h, 30d, …")


@click.group()
def user() -> None:
    """Credentials of users and programs that call the front end."""


@user.command("add")
@click.argument("name")
@_OUT
@click.option("--ttl", type=seconds(), default="8h", show_default=True, help="30m, 8h, 30d, …")
@click.option("--url", help="URL at which the user reaches the front end.")
@configured
def user_add(config: Config, name: str, out: Path, ttl: float, url: str | None) -> None:
    """Write a credential for `twinectl --credential FILE`: key, certificate, authority, URL."""
    host, port = config.reachable_at()[0], config.listen_on()[1]
    url = url or url_of(host, port)
    _write_credential(config, ("user", name, ()), out, ttl, url)
    click.echo(f"{out}: {name} may call {url} for {ttl / 3600:g} h")


@click.group()
def controller() -> None:
    """Credentials of TaskControllers, which the control plane calls."""


@controller.command("add")
@click.argument("name")
@_HOSTS
@_OUT
@_TTL
@configured
def controller_add(
    config: Config, name: str, hosts: tuple[str, ...], out: Path, ttl: float
) -> None:
    """Write a credential with which a controller can serve as NAME at these hosts.

    A running controller reloads it when it is written again to the same file.
    """
    _serving_credential(config, ("controller", name, hosts), f"controller {name}", out, ttl)


@click.command("shard-credential")
@click.argument("number", type=click.IntRange(1, 63))
@_HOSTS
@_OUT
@_TTL
@configured
def shard_credential(
    config: Config, number: int, hosts: tuple[str, ...], out: Path, ttl: float
) -> None:
    """Write a credential with which a process can run shard NUMBER at these hosts.

    A running process reloads it when it is written again to the same file.
    """
    _serving_credential(
        config, ("component", f"shard-{number}", hosts), f"shard {number}", out, ttl
    )


@click.command("front-end-credential")
@_HOSTS
@_OUT
@_TTL
@configured
def front_end_credential(config: Config, hosts: tuple[str, ...], out: Path, ttl: float) -> None:
    """Write a credential for a process that serves users at these hosts and calls for them.

    A running process reloads it when it is written again to the same file.
    """
    _serving_credential(config, ("component", "front-end", hosts), "a front end", out, ttl)


def _serving_credential(
    config: Config, subject: tuple[str, str, tuple[str, ...]], what: str, out: Path, ttl: float
) -> None:
    """Write the credential of a server, and print where it may serve for how long."""
    _write_credential(config, subject, out, ttl, "")
    click.echo(f"{out}: {what} may serve at {', '.join(subject[2])} for {ttl / 86_400:g} d")


def _write_credential(
    config: Config, subject: tuple[str, str, tuple[str, ...]], out: Path, life_s: float, url: str
) -> None:
    """Issue a credential for (role, name, hosts) and write it."""
    try:
        _issue(config, subject, out, life_s, url)
    except OSError as e:
        raise ConfigError(f"cannot use {e.filename or out}: {e.strerror}") from e


def _issue(
    config: Config, subject: tuple[str, str, tuple[str, ...]], out: Path, life_s: float, url: str
) -> None:
    from control_plane.api.people import IssuedCredential
    from control_plane.identity.authority import (
        CertificateSubject,
        check_host,
        check_user_name,
        open_authority,
    )
    from control_plane.identity.issued import FOLDER, record_issued
    from wire import pins, tls

    role, name, hosts = subject
    check_user_name(name)
    for host in hosts:
        check_host(host)
    if not 60 <= life_s <= USER_LIFE_MAX_S:
        raise InvalidInput(f"the credential of a {role} lives between 1m and 90d")
    if not config.authority_path.exists():
        raise ConfigError(
            f"there is no authority in {config.state}",
            hint="start the control plane once, and pass the same --state or --config here",
        )
    authority = open_authority(config.authority_path, config.cluster)
    held = authority.credential(CertificateSubject(role, name, hosts), url, life_s)
    tls.save(held, out)
    issued = IssuedCredential(
        name=name,
        role=role,
        issued_at=held.issued_at,
        not_after=held.not_after,
        issuer=authority.ca_hash,
        trusts=pins.ca_hashes(authority.ca_pem),
    )
    record_issued(config.state_path / FOLDER, issued)
