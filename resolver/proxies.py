"""Configuration of proxies, from where jobs answer: text, the same for the same endpoints.

Only the part that changes is written, to be read beside a configuration of the operator's own:
`haproxy -f own.cfg -f twine.cfg`, or `include twine.conf;` within nginx's `http`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.api.jobs import Endpoint, Endpoints
from wire.errors import InvalidInput

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_LISTEN = re.compile(r"(?P<host>[A-Za-z0-9_.-]*|\*|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})", re.ASCII)
_HEAD = "# Written by twine-resolver from where jobs answer. Changes by hand do not last.\n"
_ACCEPTED = "write JOB:PORT or JOB:PORT=ADDRESS:NUMBER, such as web:http=:8080"


@dataclass(frozen=True, slots=True)
class ProxiedService:
    """A named port of a job that a proxy forwards to, and where the proxy listens for it."""

    job: str
    port: str
    listen: str = ""
    """`host:port` as the proxy takes it; empty: the operator's own configuration listens."""

    @property
    def name(self) -> str:
        """Return what backends and upstreams are called."""
        return f"{self.job}-{self.port}"


def service(text: str) -> ProxiedService:
    """Return what `web:http` or `web:http=:8080` means, or raise `InvalidInput`."""
    target, given, listen = text.partition("=")
    job, colon, port = target.partition(":")
    if not (colon and NAME.fullmatch(job) and NAME.fullmatch(port)):
        raise InvalidInput(f"{text[:100]!r} names no port of a job", hint=_ACCEPTED)
    match = _LISTEN.fullmatch(listen) if given else None
    if given and (match is None or not 1 <= int(match["port"]) <= 65535):
        raise InvalidInput(f"{listen[:100]!r} is no address to listen at", hint=_ACCEPTED)
    return ProxiedService(job, port, listen)


Known = Mapping[str, Endpoints | None]
"""Job → where it answers; None if there is no such job."""


def haproxy(services: Sequence[ProxiedService], known: Known) -> str:
    """Return frontends and backends; a backend without servers answers 503."""
    parts = [_HEAD]
    for s in services:
        if s.listen:
            bind = f"*{s.listen}" if s.listen.startswith(":") else s.listen
            parts.append(f"frontend {s.name}\n    bind {bind}\n    default_backend {s.name}\n")
        lines = [f"backend {s.name}", "    balance roundrobin"]
        lines += [
            f"    server {e.task} {_at(e, s.port)} check inter 1s fall 2 rise 1"
            for e in _serving(s, known)
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def nginx(services: Sequence[ProxiedService], known: Known) -> str:
    """Return upstreams and servers; one without tasks answers 502, for nginx wants a server."""
    parts = [_HEAD]
    for s in services:
        servers = [f"    server {_at(e, s.port)};  # {e.task}" for e in _serving(s, known)]
        body = "\n".join(servers or ["    server 127.0.0.1:9 down;  # no task is listed"])
        parts.append(f"upstream {s.name} {{\n{body}\n}}\n")
        if s.listen:
            listen = s.listen.removeprefix(":")
            parts.append(
                f"server {{\n    listen {listen};\n    location / {{\n"
                f"        proxy_pass http://{s.name};\n"
                "        proxy_set_header Host $http_host;\n"
                "        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;\n"
                "        proxy_next_upstream error timeout;\n    }\n}\n"
            )
    return "\n".join(parts)


Render = Callable[[Sequence[ProxiedService], Known], str]
FORMATS: Mapping[str, Render] = {"haproxy": haproxy, "nginx": nginx}


def _serving(s: ProxiedService, known: Known) -> list[Endpoint]:
    found = known[s.job]
    return [] if found is None else [e for e in found.endpoints if s.port in e.ports]


def _at(endpoint: Endpoint, port: str) -> str:
    """Return `host:port`; a host is an address or a name of letters, digits, dots and dashes.

    An address with a zone (`fe80::1%eth0`) is none: it means something on one machine alone, and
    the zone may be any text.
    """
    host = endpoint.host
    try:
        if "%" in host:
            raise ValueError("it has a zone")
        shown = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9.-]+", host, re.ASCII):
            raise InvalidInput(f"{endpoint.task} answers at {host!r}, which is no host") from None
        shown = host
    return f"{shown}:{endpoint.ports[port]}"
