"""The sockets that a server listens on, and the admission of its connections."""

from __future__ import annotations

import grp
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from aiohttp import web

from wire.admission import ConnectionAdmission, IsVoid
from wire.errors import ConfigError
from wire.limits import LOCAL, ConnectionLimits, raise_descriptor_limit
from wire.server import http_log

BACKLOG = 4096
"""A full queue makes clients wait a second before they try again; the kernel may take less."""
SHUTDOWN_S = 3.0
"""Time that running requests get at the end; followed logs use all of it."""


_http_log = http_log(__name__)


@asynccontextmanager
async def serving(
    app: web.Application,
    tcp: socket.socket | None,
    tls: ssl.SSLContext | None,
    local: socket.socket | None,
    limits: ConnectionLimits | None = None,
    is_void: IsVoid | None = None,
) -> AsyncIterator[list[ConnectionAdmission]]:
    """Serve an application on a TCP socket and on a unix socket, within the context.

    Without `tls` the TCP socket is served in plain text. The unix socket has separate connection
    limits: callers on the network cannot block an operator.
    """
    limits = limits or ConnectionLimits().within(raise_descriptor_limit())
    runner = web.AppRunner(app, handle_signals=False, logger=_http_log, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        async with AsyncExitStack() as stack:
            admissions = []
            if tcp is not None:
                admission = ConnectionAdmission(runner, tcp, tls, limits, _http_log, is_void)
                admissions.append(await stack.enter_async_context(admission))
            if local is not None:
                admission = ConnectionAdmission(runner, local, None, LOCAL, _http_log)
                admissions.append(await stack.enter_async_context(admission))
            yield admissions
    finally:
        await runner.cleanup()


def tcp_socket(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket, or raise `ConfigError` with the reason."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError) as e:  # UnicodeError: no name of DNS, such as `a..b`
        reason = e.strerror if isinstance(e, OSError) else "this is not the name of a host"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason or e}",
            hint="does the address belong to this host, and is the port free? `ss -tlnp` shows",
        ) from e
    return sock


def unix_socket(path: Path, group: str = "", *, is_shared: bool = False) -> socket.socket:
    """Return a listening unix socket that only its owner (and `group`) can open.

    `is_shared` lets the group of this process open it.

    It replaces the socket of an ended process, but not a socket that answers or any other file.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(mask)
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        if group or is_shared:
            path.chmod(0o660)
        sock.listen(BACKLOG)
    except (OSError, KeyError) as e:
        sock.close()
        reason = e.strerror if isinstance(e, OSError) else f"there is no group {group!r}"
        raise ConfigError(f"cannot listen on {path}: {reason or e}") from e
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def local_socket(path: Path, *, is_shared: bool = False) -> Iterator[socket.socket]:
    """Listen on a `unix_socket` within the context, and remove its file then."""
    sock = unix_socket(path, is_shared=is_shared)
    try:
        yield sock
    finally:
        sock.close()
        path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        kind = "folder" if path.is_dir() else "file"
        raise ConfigError(f"cannot listen on {path}: it is a {kind}, not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise ConfigError(
        f"cannot listen on {path}: another process answers there",
        hint="stop it, or choose another --socket",
    )
