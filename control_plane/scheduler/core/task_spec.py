"""Turns a job's specification and a placement into the task specification for an agent."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import asdict, replace

from agent.api import Life, Network, Probe, TaskSpec
from agent.api.network import port_variable
from agent.api.notices import NoticeSettings
from control_plane.api.job_life import JobNotice, JobProbe
from control_plane.api.jobs import JobSpec, Placement, task_id

_TEMPLATE = re.compile(r"\$?\$\{([^}$]*)\}")
"""`${name}`; `$${` stands for a literal `${`."""
RESERVED_PREFIX = "TWINE_"
"""Environment variables that Twine sets."""
_AS_WRITTEN = (
    *("image", "entitlement", "limits", "restart", "stop_timeout_s", "disconnect", "resources"),
    *("volumes", "credentials", "configuration", "relaxations", "ulimits", "umask", "oom"),
    *("stdout", "root", "root_max_bytes", "identity"),
)
"""Fields of a task's specification that are as in its job's."""


def unknown_templates(text: str, ports: list[str]) -> list[str]:
    """Return the unknown names in `${…}`."""
    known = {"task", "machine", *(f"port:{name}" for name in ports)}
    return [
        m.group(1)
        for m in _TEMPLATE.finditer(text)
        if not m.group(0).startswith("$$") and m.group(1) not in known
    ]


def task_spec(
    spec: JobSpec, index: int, placement: Placement, *, generation: int, epoch: int
) -> TaskSpec:
    """Return the desired state of one task on the machine where it is placed."""
    name = task_id(spec.name, index)
    values = {"task": name, "machine": placement.machine}
    values |= {f"port:{port}": str(number) for port, number in placement.ports.items()}
    environment = {key: _fill(text, values) for key, text in spec.environment.items()}
    environment |= {
        "TWINE_JOB": spec.name,
        "TWINE_TASK": name,
        "TWINE_MACHINE": placement.machine,
        **{port_variable(port): str(number) for port, number in placement.ports.items()},
    }
    if spec.runtime:
        environment["TWINE_RUNTIME"] = spec.runtime
    return TaskSpec(
        generation=generation,
        epoch=epoch,
        command=[_fill(argument, values) for argument in spec.command],
        environment=environment,
        job=spec.name,
        probe=_probe(spec.probe, placement, values),
        life=_life(spec, placement, values),
        network=Network(**asdict(spec.network), ports=placement.ports),
        **{name: getattr(spec, name) for name in _AS_WRITTEN},
    )


def _probe(p: JobProbe | None, placement: Placement, values: Mapping[str, str]) -> Probe | None:
    if p is None:
        return None
    command = [_fill(argument, values) for argument in p.command]
    return Probe(**asdict(p) | {"port": _port(p.port, placement), "command": command})


def _notice(notice: JobNotice | None, placement: Placement) -> NoticeSettings | None:
    if notice is None:
        return None
    return NoticeSettings(**asdict(notice) | {"port": _port(notice.port, placement)})


def _port(name: str | None, placement: Placement) -> int | None:
    return None if name is None else placement.ports[name]


def _life(spec: JobSpec, placement: Placement, values: Mapping[str, str]) -> Life:
    life = spec.life

    def filled(command: list[str]) -> list[str]:
        return [_fill(argument, values) for argument in command]

    hook = life.pre_stop
    return Life(
        init=[replace(step, command=filled(step.command)) for step in life.init],
        pre_stop=None if hook is None else replace(hook, command=filled(hook.command)),
        notice=_notice(life.notice, placement),
        max_run_s=life.max_run_s,
        startup=_probe(life.startup, placement, values),
        liveness=_probe(life.liveness, placement, values),
    )


def _fill(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match.group(0).startswith("$$"):
            return match.group(0)[1:]
        return values[match.group(1)]

    return _TEMPLATE.sub(value, text)
