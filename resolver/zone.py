"""The answer to a DNS question about a job, from its endpoints.

With the zone `twine.internal` and job `web` whose tasks have a port named `http`:

    web.twine.internal                A, AAAA   the addresses of all listed tasks
    web-3.web.twine.internal          A, AAAA   the address of task 3, CNAME if that is a name
    _http._tcp.web.twine.internal     SRV       port and name of each listed task (RFC 2782)

Only SRV records have weights; a client treats all addresses of a name alike. A task with weight 0
gets no requests and is left out. A job without listed tasks has a name without records; an unknown
job has no name (RFC 2308 distinguishes the two).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.policy import JobName
from control_plane.api.weights import USUAL_WEIGHT

SRV_PRIORITY, SRV_WEIGHT = 0, 1
"""Priority of all tasks, and their weight if discovery has no other (RFC 2782)."""
PROTOCOLS = ("_tcp", "_udp")


@dataclass(frozen=True, slots=True)
class DnsRecord:
    """One record; names are relative to the zone unless they end with a dot."""

    name: str
    type: str
    data: str


@dataclass(frozen=True, slots=True)
class ZoneSubject:
    """The subject of a name: a job, one of its tasks, or one of its ports."""

    job: str
    task: str = ""
    port: str = ""
    protocol: str = ""
    """`_tcp` or `_udp`; a port of a task is valid for both."""


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    """The records that answer a question, and additional ones that make the next one needless."""

    answers: tuple[DnsRecord, ...] = ()
    additional: tuple[DnsRecord, ...] = ()
    exists: bool = True
    """Whether the name exists; it may have no record of the requested type."""


NO_SUCH_NAME = DnsAnswer(exists=False)


def is_job_name(text: str) -> bool:
    """Return whether a job can have this name."""
    try:
        msgspec.convert(text, JobName)
    except msgspec.ValidationError:
        return False
    return True


def subject(labels: Sequence[str]) -> ZoneSubject | None:
    """Return the subject of the labels before the zone, None if there is no such name.

    A name that no job can have is not looked up: the front end refuses requests that contain one.
    """
    if not labels or not is_job_name(labels[-1].lower()):
        return None
    match [label.lower() for label in labels]:
        case [job]:
            return ZoneSubject(job)
        case [task, job] if task.startswith(f"{job}-"):
            return ZoneSubject(job, task=task)
        case [port, proto, job] if port.startswith("_") and proto in PROTOCOLS and port[1:]:
            return ZoneSubject(job, port=port[1:], protocol=proto)
        case _:
            return None


def answer(about: ZoneSubject, kind: str, endpoints: Endpoints | None) -> DnsAnswer:
    """Return the answer to a question of type `kind`; `endpoints` is None without such a job."""
    if endpoints is None:
        return NO_SUCH_NAME
    listed = endpoints.endpoints
    if about.port:
        return _service(about, kind, listed)
    if about.task:
        return _task(about, kind, listed)
    hosts = dict.fromkeys(e.host for e in listed if e.weight)
    return DnsAnswer(_addresses(about.job, kind, hosts))


def _service(about: ZoneSubject, kind: str, listed: Sequence[Endpoint]) -> DnsAnswer:
    serving = [e for e in listed if about.port in e.ports]
    if listed and not serving:
        return NO_SUCH_NAME
    serving = [e for e in serving if e.weight]
    is_weighted = any(e.weight != USUAL_WEIGHT for e in serving)
    if kind not in ("SRV", "ANY"):
        return DnsAnswer()
    owner = f"_{about.port}.{about.protocol}.{about.job}"
    records: list[DnsRecord] = []
    more: list[DnsRecord] = []
    for e in serving:
        target = f"{e.task}.{about.job}"
        weight = e.weight if is_weighted else SRV_WEIGHT
        data = f"{SRV_PRIORITY} {weight} {e.ports[about.port]} {target}"
        records.append(DnsRecord(owner, "SRV", data))
        more += _addresses(target, "ANY", [e.host])
    return DnsAnswer(tuple(records), tuple(more))


def _task(about: ZoneSubject, kind: str, listed: Sequence[Endpoint]) -> DnsAnswer:
    found = next((e for e in listed if e.task == about.task), None)
    if found is None:
        return NO_SUCH_NAME
    name = f"{found.task}.{about.job}"
    if ip_version(found.host) == 0:
        return DnsAnswer((DnsRecord(name, "CNAME", f"{found.host.rstrip('.')}."),))
    return DnsAnswer(_addresses(name, kind, [found.host]))


def _addresses(name: str, kind: str, hosts: Iterable[str]) -> tuple[DnsRecord, ...]:
    wanted = {"A": (4,), "AAAA": (6,), "ANY": (4, 6)}.get(kind, ())
    return tuple(
        DnsRecord(name, "A" if version == 4 else "AAAA", host)
        for host in hosts
        if (version := ip_version(host)) in wanted
    )


def ip_version(host: str) -> int:
    """Return 4 or 6 for an address, 0 for a host name or an address with a zone (`fe80::1%e0`)."""
    try:
        return 0 if "%" in host else ipaddress.ip_address(host).version
    except ValueError:
        return 0
