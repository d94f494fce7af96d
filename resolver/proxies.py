"""Renders configuration of proxies from the addresses of jobs, deterministically.

Only the variable part is rendered, to be read together with the operator's configuration:
`haproxy -f own.cfg -f twine.cfg`, or `include twine.conf;` within nginx's `http`. The formats are
jinja2 templates; an operator may provide one for another proxy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.watch import MAX_JOBS_WATCHED
from control_plane.api.weights import USUAL_WEIGHT
from resolver.zone import ip_version, is_job_name
from wire.errors import InvalidInput

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_LISTEN = re.compile(r"(?P<host>[A-Za-z0-9_.-]*|\*|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})", re.ASCII)
_HEAD = "# Written by twine-resolver from the addresses of jobs. Changes by hand are overwritten."
_TEMPLATES = Path(__file__).parent / "templates"
_ACCEPTED = "write JOB:PORT or JOB:PORT=ADDRESS:NUMBER, such as web:http=:8080"


@dataclass(frozen=True, slots=True)
class ProxiedService:
    """A named port of a job to which a proxy forwards, and the proxy's listen address."""

    job: str
    port: str
    listen: str = ""
    """`host:port` for the proxy; empty: the operator's own configuration listens."""

    @property
    def name(self) -> str:
        """Return the name of its backend or upstream."""
        return f"{self.job}-{self.port}"


def parse_service(text: str) -> ProxiedService:
    """Return the service of `web:http` or `web:http=:8080`, or raise `InvalidInput`."""
    target, given, listen = text.partition("=")
    job, colon, port = target.partition(":")
    if not (colon and is_job_name(job) and NAME.fullmatch(port)):
        raise InvalidInput(f"{text[:100]!r} does not name a port of a job", hint=_ACCEPTED)
    match = _LISTEN.fullmatch(listen) if given else None
    if given and (match is None or not 1 <= int(match["port"]) <= 65535):
        raise InvalidInput(f"{listen[:100]!r} is not a listen address", hint=_ACCEPTED)
    return ProxiedService(job, port, listen)


def parse_services(texts: Sequence[str]) -> list[ProxiedService]:
    """Return the services of these texts without duplicates; raise `InvalidInput` on a conflict.

    Two backends with one name, or two listeners at one address, are no valid configuration.
    """
    distinct = list(dict.fromkeys(parse_service(text) for text in texts))
    if (jobs := len({one.job for one in distinct})) > MAX_JOBS_WATCHED:
        raise InvalidInput(
            f"{jobs} jobs are more than one resolver follows ({MAX_JOBS_WATCHED})",
            hint="run several, each with a part of the jobs and its own --file",
        )
    named, listening = dict[str, ProxiedService](), dict[str, ProxiedService]()
    for one in distinct:
        if (other := named.setdefault(one.name, one)) is not one:
            raise InvalidInput(
                f"{_service_text(other)} and {_service_text(one)} would both be called {one.name}",
                hint="name each port of a job once",
            )
        if one.listen and (other := listening.setdefault(one.listen, one)) is not one:
            raise InvalidInput(
                f"{_service_text(other)} and {_service_text(one)} would listen at one address"
            )
    return distinct


def _service_text(one: ProxiedService) -> str:
    return f"{one.job}:{one.port}" + (f"={one.listen}" if one.listen else "")


Known = Mapping[str, Endpoints | None]
"""Job → its addresses; None if there is no such job."""


Render = Callable[[Sequence[ProxiedService], Known], str]


def compile_template(text: str, name: str) -> Render:
    """Return a function that renders a jinja2 template; `name` is for errors.

    The template gets `head` (a comment) and `services`. A service has `job`, `port`, `name`,
    `listen`, `weighted` (whether weights differ) and `servers`. A server has `task`, `host`,
    `port`, `weight` and `at` (`host:port`). Raises `InvalidInput` for an invalid template.
    """
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        compiled = environment.from_string(text)
    except jinja2.TemplateSyntaxError as e:
        raise InvalidInput(f"{name} is not a template: {e.message} (line {e.lineno})") from e

    def render(services: Sequence[ProxiedService], known: Known) -> str:
        rendered = [_rendered(service, known[service.job]) for service in services]
        try:
            return compiled.render(head=_HEAD, services=rendered)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise InvalidInput(f"{name} cannot be rendered: {e}") from e

    return render


def shipped_template(name: str) -> Render:
    """Return a function that renders one of our templates, given its file name."""
    return compile_template((_TEMPLATES / name).read_text(), name)


FORMATS: Mapping[str, str] = {"haproxy": "haproxy.cfg.j2", "nginx": "nginx.conf.j2"}
"""Supported proxies → our template. Backends without tasks are rendered, too: HAProxy answers 503
for them, and nginx 502."""


def _rendered(s: ProxiedService, found: Endpoints | None) -> dict[str, object]:
    serving = [] if found is None else [e for e in found.endpoints if s.port in e.ports]
    return {
        "job": s.job,
        "port": s.port,
        "name": s.name,
        "listen": s.listen,
        "servers": [_server(e, s.port) for e in serving],
        "weighted": any(e.weight != USUAL_WEIGHT for e in serving),
    }


def is_host(host: str) -> bool:
    """Return whether this is an address, or a name of letters, digits, dots and dashes.

    An address with a zone (`fe80::1%eth0`) is none: it is valid only on one machine, and the zone
    may be any text.
    """
    return bool(ip_version(host) or re.fullmatch(r"[A-Za-z0-9.-]+", host, re.ASCII))


def _server(endpoint: Endpoint, name: str) -> dict[str, object]:
    host, port = endpoint.host, endpoint.ports[name]
    if not is_host(host):
        raise InvalidInput(f"{endpoint.task} answers at {host!r}, which is not a host")
    return {
        "task": endpoint.task,
        "host": host,
        "port": port,
        "at": f"[{host}]:{port}" if ip_version(host) == 6 else f"{host}:{port}",
        "weight": endpoint.weight,
    }
