"""All errors of a job file at once, for the command line and the front end.

Two kinds of rules. What a single field may hold is written in its type and checked by
`wire.violations`. Relations between fields are checked here, on the plain document, so that all
errors are listed together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from agent.api import Limits, Reach, Relaxation, Relaxations, Resources, VolumeMap
from agent.api.credentials import contradictions as configuration_contradictions
from agent.api.own_init import contradictions as init_contradictions
from agent.api.resources import contradiction as resource_contradiction
from agent.api.volumes import contradiction as volume_contradiction
from control_plane.api.autoscale import autoscale_errors, limit_errors
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Admission
from control_plane.api.requirement_parser import parse_with_errors, why_unknown
from wire.errors import FieldError
from wire.routes import invalid
from wire.units import shown
from wire.violations import MAX_ERRORS, name_shown, violations

MAX_JOB_FILE_BYTES = 256 << 10
_PLACEHOLDER = re.compile(r"\$\{([^}$]*)\}")
"""Without `$` inside, so that no text restarts the match again and again (`${${${…`)."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON and YAML can contain but UTF-8 cannot."""
_UNREADABLE = (msgspec.ValidationError, RecursionError, UnicodeError)
"""The errors of a value that its field does not accept."""
MAX_LISTED = 16
MAX_TEXTS = 4096
"""Texts of a command or an environment that are checked; the types of both refuse more."""
GPU_PARTS = (0.125, 0.25, 0.5)
"""Allowed parts of a GPU: each divides the next one, so parts on one machine waste nothing."""


def job_errors(document: Any) -> list[FieldError]:
    """Return all errors of a document (plain values) as a job."""
    return [*violations(document, JobSpec), *job_relations(document)][:MAX_ERRORS]


def job_spec(document: Any, what: str) -> JobSpec:
    """Return the job, or raise `InvalidInput` with all of its errors."""
    if found := job_errors(document):
        raise invalid(found, what)
    return msgspec.convert(document, JobSpec)


def job_relations(document: Any) -> list[FieldError]:
    """Return the contradictions between fields of a job, as far as the fields are readable.

    At most `MAX_ERRORS`: the document may be hostile, and the search ends there.
    """
    return list(islice(_relations(document), MAX_ERRORS)) if isinstance(document, dict) else []


def push_relations(document: Any) -> list[FieldError]:
    """Return the contradictions in the specification of a push, like `job_relations`."""
    found = job_relations(document.get("spec")) if isinstance(document, dict) else []
    spec = [FieldError(field=f"spec.{error.field}", reason=error.reason) for error in found]
    return [*spec, *_exclusive_errors(document, share=1.0, tasks=None)]


def canary_relations(document: Any) -> list[FieldError]:
    """Return the contradictions between fields of a canary."""
    return _exclusive_errors(document, share=None, tasks=1)


def _exclusive_errors(document: Any, share: float | None, tasks: int | None) -> list[FieldError]:
    """Refuse a share and a number of tasks at once; `share` and `tasks` are their defaults."""
    if not isinstance(document, dict):
        return []
    if document.get("share", share) in (share, None) or document.get("tasks", tasks) == tasks:
        return []
    return [FieldError(field="tasks", reason="a share is given as well: give one of them")]


def _relations(document: dict[Any, Any]) -> Iterator[FieldError]:
    listed = document.get("ports", [])
    some = listed[: 2 * MAX_LISTED] if isinstance(listed, list) else []
    ports = [p for p in some if isinstance(p, str)]
    yield from requirement_errors(document.get("requires"))
    yield from preference_errors(document.get("preferences"))
    for name, count in Counter(ports).items():
        if count > 1:
            yield FieldError(field="ports", reason=f"{shown(name)} is listed {count} times")
    for field, probe in _probes(document):
        port = probe.get("port")
        if isinstance(port, str) and port not in ports:
            yield FieldError(field=f"{field}.port", reason=_unknown_port_text(port, ports))
    yield from _update_errors(document)
    yield from _configuration_errors(document)
    yield from _gpu_errors(document)
    yield from _network_errors(document)
    yield from _volume_errors(document)
    yield from _own_cpu_errors(document)
    yield from _init_errors(document)
    yield from autoscale_errors(document.get("autoscale"))
    yield from limit_errors(document)
    yield from _text_errors(document, ports)


def _gpu_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    gpus = document.get("gpus")
    if isinstance(gpus, float) and gpus > 0 and gpus % 1 and gpus not in GPU_PARTS:
        reason = f"{gpus:g} is not valid; whole GPUs, or one of 0.125, 0.25 and 0.5 of one"
        yield FieldError(field="gpus", reason=reason)


def _network_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    network = document.get("network")
    if isinstance(network, dict) and network.get("mode", "host") == "host":
        needs = "needs a network of its own (mode = private)"
        for name in ("egress_mbps", "allow_from"):
            if network.get(name):
                yield FieldError(field=f"network.{name}", reason=needs)


def _text_errors(document: dict[Any, Any], ports: list[str]) -> Iterator[FieldError]:
    """Yield errors of texts that a program cannot receive, or would receive changed."""
    known = frozenset(ports)
    for field, text in _texts(document):
        if _SURROGATE.search(text):
            reason = f"{shown(text)} cannot be written as UTF-8"
            yield FieldError(field=field, reason=reason)
        reported: set[str] = set()
        for port in _unknown_ports(text, known):
            if port not in reported:
                reported.add(port)
                yield FieldError(field=field, reason=_unknown_port_text(port, ports))


def _volume_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    try:
        volumes = msgspec.convert(document.get("volumes", {}), VolumeMap)
        limits = msgspec.convert(document.get("limits", {}), Limits)
    except _UNREADABLE:
        return  # their types report the errors
    if error := volume_contradiction(volumes, limits.memory_max_bytes):
        yield FieldError(field=error[0], reason=error[1])


def _init_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    """Yield errors of keys that an own init excludes, and of a missing command without one."""
    try:
        relaxations = msgspec.convert(document.get("relaxations", []), Relaxations)
        resources = msgspec.convert(document.get("resources", {}), Resources)
        network = msgspec.convert(document.get("network", {}), Reach)
        command = msgspec.convert(document.get("command", []), list[Any])
    except _UNREADABLE:
        return  # their types report the errors
    for field, reason in init_contradictions(relaxations, command, network, resources):
        yield FieldError(field=field, reason=reason)
    if not command and not {Relaxation.OWN_INIT, Relaxation.NESTED} & {*relaxations}:
        reason = (
            "missing; a task without a command runs the init of its image, which requires own-init"
        )
        yield FieldError(field="command", reason=reason)


def _own_cpu_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    """Yield errors of keys that exclusive CPUs exclude: those that would claim more or fewer."""
    try:
        resources = msgspec.convert(document.get("resources", {}), Resources)
        limits = msgspec.convert(document.get("limits", {}), Limits)
    except _UNREADABLE:
        return  # their types report the errors
    if error := resource_contradiction(resources, limits.cpu_max_cores):
        yield FieldError(field=error[0], reason=error[1])
    if not resources.exclusive_cpus:
        return
    claims = f"resources.exclusive_cpus = {resources.exclusive_cpus} is the CPU demand of a task"
    for field in ("cpus", "rru"):
        if document.get(field) is not None:
            yield FieldError(field=field, reason=f"leave it out: {claims}")
    overcommit = document.get("overcommit")
    if isinstance(overcommit, dict) and overcommit.get("cpu", 1) != 1:
        yield FieldError(field="overcommit.cpu", reason=f"leave it out: {claims}, whole")


def _configuration_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    given, secret = document.get("configuration"), document.get("credentials")
    if isinstance(given, dict) and all(
        isinstance(part, str) for pair in given.items() for part in pair
    ):
        credentials = secret if isinstance(secret, dict) else ()
        for field, reason in configuration_contradictions(given, credentials):
            yield FieldError(field=field, reason=reason)


def _update_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    update = document.get("update")
    if not isinstance(update, dict):
        return
    surge = update.get("surge", 0)
    if update.get("max_unavailable") == 0 and not surge:
        reason = "0 is only possible with surge: otherwise no task could ever be updated or moved"
        yield FieldError(field="update.max_unavailable", reason=reason)
    if surge and document.get("admission") == Admission.GANG:
        reason = "a job with admission = gang cannot have any: it is placed as a whole"
        yield FieldError(field="update.surge", reason=reason)


def requirement_errors(listed: Any) -> list[FieldError]:
    """Return the errors in a list of requirements, as far as its items are texts."""
    if not isinstance(listed, list):
        return []
    some = listed[:MAX_LISTED]  # a longer list is refused for its length
    texts = [(i, text) for i, text in enumerate(some) if isinstance(text, str) and text]
    return [
        FieldError(field=f"requires[{i}]", reason=reason)
        for i, text in texts
        for reason in parse_with_errors(text)[1]
    ]


def preference_errors(listed: Any) -> Iterator[FieldError]:
    """Yield errors of properties, skew bounds and weights in a list of preferences."""
    some = listed[:MAX_LISTED] if isinstance(listed, list) else []
    for i, preference in enumerate(some):
        if not isinstance(preference, dict):
            continue
        at, property_ = f"preferences[{i}].", preference.get("property")
        if isinstance(property_, str) and (reason := why_unknown(property_)):
            yield FieldError(field=f"{at}property", reason=reason)
        is_even = preference.get("strategy", "even") == "even"
        weights, skew = preference.get("weights"), preference.get("max_skew")
        if weights and not is_even:
            yield FieldError(field=f"{at}weights", reason="only for even")
        if skew is None:
            continue
        if not is_even:
            reason = "only for even: the other strategies spread tasks unevenly"
        elif weights:
            reason = "cannot be combined with weights: these spread tasks unevenly"
        elif property_ == "machine":
            reason = "cannot be used for machines: at_most has the same effect there"
        else:
            continue
        yield FieldError(field=f"{at}max_skew", reason=reason)


def _probes(document: dict[Any, Any]) -> list[tuple[str, dict[Any, Any]]]:
    life = document.get("life")
    hooks = life if isinstance(life, dict) else {}
    named = [("probe", document.get("probe"))]
    named += [(f"life.{name}", hooks.get(name)) for name in ("startup", "liveness")]
    return [(field, probe) for field, probe in named if isinstance(probe, dict)]


def _commands(document: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return every command of a job, with its field."""
    life = document.get("life")
    hooks = life if isinstance(life, dict) else {}
    steps, hook = hooks.get("init"), hooks.get("pre_stop")
    parts: list[tuple[str, Any]] = [
        ("", document),
        *((f"{name}.", probe) for name, probe in _probes(document)),
    ]
    if isinstance(steps, list):
        parts += [(f"life.init[{i}].", step) for i, step in enumerate(steps[:MAX_LISTED])]
    parts += [("life.pre_stop.", hook)]
    return [(f"{at}command", part.get("command")) for at, part in parts if isinstance(part, dict)]


def _texts(document: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield every text in which placeholders are replaced, with its field."""
    environment = document.get("environment")
    for field, command in _commands(document):
        if isinstance(command, list):
            for i, text in enumerate(command[:MAX_TEXTS]):
                if isinstance(text, str):
                    yield f"{field}[{i}]", text
    if isinstance(environment, dict):
        for name, text in islice(environment.items(), MAX_TEXTS):
            if isinstance(text, str):
                yield f"environment.{name_shown(name)}", text


def _unknown_ports(text: str, ports: frozenset[str]) -> Iterator[str]:
    """Yield the ports of placeholders that would reach the program unreplaced."""
    for match in _PLACEHOLDER.finditer(text):
        kind, _, port = match[1].partition(":")
        if kind == "port" and port not in ports:
            yield port


def _unknown_port_text(port: str, ports: list[str]) -> str:
    known = ", ".join(shown(name) for name in ports[:MAX_LISTED]) or "none"
    more = ", …" if len(ports) > MAX_LISTED else ""
    return f"there is no port {shown(port)} in `ports`, which has: {known}{more}"
