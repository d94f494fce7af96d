"""The control plane of a lab: its configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from control_plane.config import Config, load
from vm_lab.control import LabControlPlane, with_services
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths
from vm_lab.topology import read_topology


def paths_of(tmp_path: Path) -> LabPaths:
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    paths.make()
    return paths


def started(paths: LabPaths, monkeypatch: pytest.MonkeyPatch, config: Path | None = None) -> Config:
    """Return the configuration with which the lab starts its control plane."""
    argvs: list[list[Any]] = []

    def spawn(_: LabSandbox, argv: list[Any], _log: Path) -> int:
        argvs.append(argv)
        return 1

    monkeypatch.setattr(LabSandbox, "spawn", spawn)
    monkeypatch.setattr("vm_lab.control.is_ready", lambda _: True)
    LabControlPlane(LabSandbox(paths), read_topology()).start(config)
    words = argvs[0]
    file = words[words.index("--config") + 1] if "--config" in words else None
    return load(file, {})


@pytest.mark.behaviour("BUG-LB3")
def test_the_console_of_a_lab_reads_the_services_of_this_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly it read those of the host: `make demo-delivery` showed no conveyor."""
    paths = paths_of(tmp_path)
    config = started(paths, monkeypatch)
    assert config.conveyor == f"unix:{tmp_path}/run/lab/conveyor.sock"
    assert config.autoscaler == f"{tmp_path}/run/lab/autoscaler.sock"


@pytest.mark.behaviour("BUG-LB3")
def test_settings_of_the_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text('conveyor = ""\nlog_level = "debug"\n[scheduler]\nshards = 2\n')
    config = started(paths_of(tmp_path), monkeypatch, own)
    assert (config.conveyor, config.log_level, config.scheduler.shards) == ("", "debug", 2)
    assert config.autoscaler == f"{tmp_path}/run/lab/autoscaler.sock"


def test_a_configuration_that_is_not_toml_reaches_the_control_plane_unchanged(
    tmp_path: Path,
) -> None:
    assert with_services("listen = \n", paths_of(tmp_path)) == "listen = \n"
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads("listen = \n")
