"""Credentials of users, controllers and shards: `twine-control-plane user | controller | …`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from control_plane import config as configuration
from control_plane.commands import CONFIG, STATE, fail
from control_plane.config import Config
from control_plane.process import url_of
from wire.errors import ConfigError, InvalidInput, TwineError
from wire.options import seconds

USER_LIFE_MAX_S = 90 * 86_400.0


@click.group()
def user() -> None:
    """Credentials of users and programs that call the front end."""


@user.command("add")
@click.argument("name")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600.")
@click.option("--ttl", type=seconds(), default="8h", show_default=True, help="30m, 8h, 30d, …")
@click.option("--url", help="Where the user reaches the front end.")
@CONFIG
@STATE
def user_add(name: str, out: Path, ttl: float, url: str | None, **given: Any) -> None:
    """Write a credential for `twinectl --credential FILE`: key, certificate, authority, URL."""
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
        host, port = config.reachable_at()[0], config.listen_on()[1]
        url = url or url_of(host, port)
        _write_credential(config, ("user", name, ()), out, ttl, url)
        click.echo(f"{out}: {name} may call {url} for {ttl / 3600:g} h")
    except TwineError as e:
        fail(e)
    except OSError as e:
        fail(ConfigError(f"cannot use {e.filename or out}: {e.strerror}"))


@click.group()
def controller() -> None:
    """Credentials of TaskControllers, which the control plane calls."""


@controller.command("add")
@click.argument("name")
@click.option("--host", "hosts", multiple=True, required=True, help="Where it serves; repeat.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600.")
@click.option("--ttl", type=seconds(), default="30d", show_default=True, help="8h, 30d, …")
@CONFIG
@STATE
def controller_add(name: str, hosts: tuple[str, ...], out: Path, ttl: float, **given: Any) -> None:
    """Write a credential with which a controller can serve as NAME at these hosts.

    A running controller reloads it when it is written again to the same file.
    """
    _serving_credential(("controller", name, hosts), f"controller {name}", out, ttl, given)


@click.command("shard-credential")
@click.argument("number", type=click.IntRange(1, 63))
@click.option("--host", "hosts", multiple=True, required=True, help="Where it serves; repeat.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600.")
@click.option("--ttl", type=seconds(), default="30d", show_default=True, help="8h, 30d, …")
@CONFIG
@STATE
def shard_credential(
    number: int, hosts: tuple[str, ...], out: Path, ttl: float, **given: Any
) -> None:
    """Write a credential with which a process can run shard NUMBER at these hosts.

    A running process reloads it when it is written again to the same file.
    """
    _serving_credential(("component", f"shard-{number}", hosts), f"shard {number}", out, ttl, given)


@click.command("front-end-credential")
@click.option("--host", "hosts", multiple=True, required=True, help="Where it serves; repeat.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, 0600.")
@click.option("--ttl", type=seconds(), default="30d", show_default=True, help="8h, 30d, …")
@CONFIG
@STATE
def front_end_credential(hosts: tuple[str, ...], out: Path, ttl: float, **given: Any) -> None:
    """Write a credential for a process that serves users at these hosts and calls for them.

    A running process reloads it when it is written again to the same file.
    """
    _serving_credential(("component", "front-end", hosts), "a front end", out, ttl, given)


def _serving_credential(
    subject: tuple[str, str, tuple[str, ...]],
    what: str,
    out: Path,
    ttl: float,
    given: dict[str, Any],
) -> None:
    """Write the credential of a server, and print where it may serve for how long."""
    try:
        config = configuration.load(given["file"], {"state": given["state"]})
        _write_credential(config, subject, out, ttl, "")
        where = ", ".join(subject[2])
        click.echo(f"{out}: {what} may serve at {where} for {ttl / 86_400:g} d")
    except TwineError as e:
        fail(e)
    except OSError as e:
        fail(ConfigError(f"cannot use {e.filename or out}: {e.strerror}"))


def _write_credential(
    config: Config, subject: tuple[str, str, tuple[str, ...]], out: Path, life_s: float, url: str
) -> None:
    """Issue a credential for (role, name, hosts) and write it."""
    from control_plane.api.people import IssuedCredential
    from control_plane.identity.authority import (
        CertificateSubject,
        check_host,
        check_user_name,
        open_authority,
    )
    from control_plane.identity.issued import FOLDER, note
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
    note(config.state_path / FOLDER, issued)
