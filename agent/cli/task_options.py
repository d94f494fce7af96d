"""Combines the options and the file of `twine-agent run` to one specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from agent import api
from agent.config import is_port
from wire.errors import InvalidInput
from wire.quantity_fields import TEXT_ENCODING, parse_quantities
from wire.toml_limits import parse_toml


def task_document(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options and the file as plain values; the file takes precedence."""
    limits = {"memory_max_bytes": int(given["memory"]), "cpu_max_cores": given["cores"]}
    wanted: dict[str, Any] = {
        "environment": dict(_pair(e) for e in given["env"]),
        "entitlement": given["entitlement"],
        "limits": limits,
        "restart": {"when": given["restart"]},
    }
    if network := _network(given):
        wanted["network"] = network
    if given["relax"]:
        wanted["relaxations"] = list(given["relax"])
    if given["credential"]:
        split = [word.partition("=") for word in given["credential"]]
        wanted["credentials"] = {file: name or file for file, _, name in split}
    if given["port"] is not None:
        probe = {"port": given["port"], "path": given["path"]}
        wanted["probe"] = {**probe, "start_period_s": given["start_period"]}
    life = {"health_gate_s": given["health_gate"], "max_run_s": given["max_run"]}
    if set_life := {k: v for k, v in life.items() if v is not None}:
        wanted["life"] = set_life
    if given["file"] is None:
        return wanted
    read = _read(given["file"])
    for name in ("limits", "restart", "life", "environment", "network", "credentials"):
        inner = read.get(name)
        if isinstance(inner, dict):
            read[name] = {**wanted.get(name, {}), **inner}
    return {**wanted, **read}


def _network(given: dict[str, Any]) -> dict[str, Any]:
    """Return the network settings of the options; empty without any."""
    pairs = [word.partition("=") for word in given["listen"]]
    if wrong := [name for name, _, port in pairs if not is_port(port)]:
        raise InvalidInput(f"--listen {wrong[0]!r} is not NAME=PORT", hint="--listen http=8080")
    options: dict[str, Any] = {
        "mode": given["network"] if given["network"] != api.NetworkMode.HOST else "",
        "ports": {name: int(port) for name, _, port in pairs},
        "allow_from": list(given["allow_from"]),
        "unix_sockets": given["unix_sockets"],
    }
    settings = {name: value for name, value in options.items() if value}
    if given["egress_mbps"] is not None:
        settings["egress_mbps"] = given["egress_mbps"]
    return settings


def _read(path: Path) -> dict[str, Any]:
    """Return a file as plain values, with numbers for sizes and times that are written as text."""
    try:
        document = parse_toml(path.read_text(TEXT_ENCODING))
    except (OSError, ValueError) as e:
        raise InvalidInput(f"cannot read {path}: {e}", hint="it must be TOML") from e
    values = parse_quantities(document, api.TaskSpec)
    assert isinstance(values, dict)
    return values


def checked_spec(document: dict[str, Any]) -> api.TaskSpec:
    """Return the specification after the same checks as in the server."""
    from wire.routes import decode_json

    spec = decode_json(msgspec.json.encode(document), api.TaskSpec, "the task", numbers=False)
    assert isinstance(spec, api.TaskSpec)
    return spec


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"--env {text!r} is not NAME=VALUE")
    return name, value
