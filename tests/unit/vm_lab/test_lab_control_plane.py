"""The control plane of a lab: its configuration."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from control_plane.config import Config, load
from vm_lab.cli import main
from vm_lab.control import LabControlPlane, with_services
from vm_lab.errors import LabError
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths, ProcessRef, process_ref
from vm_lab.status import agent_states
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


@pytest.mark.behaviour("BUG-LB8")
def test_a_configuration_that_does_not_start_does_not_replace_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly every later start used the bad file, too."""
    paths, good, bad = paths_of(tmp_path), tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('log_level = "debug"\n')
    assert started(paths, monkeypatch, good).log_level == "debug"
    bad.write_text("log_level = 3\n")
    paths.control_plane.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(LabSandbox, "spawn", lambda *_: 1)
        patch.setattr("vm_lab.control.is_ready", lambda _: False)
        patch.setattr("vm_lab.control.process_ref", lambda pid: ProcessRef(pid=pid, start_ticks=0))
        with pytest.raises(LabError, match="not ready"):
            LabControlPlane(LabSandbox(paths), read_topology()).start(bad)
    assert started(paths, monkeypatch).log_level == "debug"


@pytest.mark.behaviour("BUG-LB8")
def test_a_configuration_that_is_not_utf_8_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes(b'state = "\xfc"\n')
    with pytest.raises(LabError, match=r"latin\.toml: it is not UTF-8"):
        LabControlPlane(LabSandbox(paths_of(tmp_path)), read_topology()).start(file)


@pytest.mark.behaviour("BUG-LB11")
def test_another_configuration_is_refused_while_the_control_plane_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly it was ignored, and the command reported success."""
    paths, first, second = paths_of(tmp_path), tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text('log_level = "debug"\n')
    second.write_text('log_level = "info"\n')
    monkeypatch.setattr("vm_lab.control.process_ref", lambda _: process_ref(os.getpid()))
    started(paths, monkeypatch, first)
    control = LabControlPlane(LabSandbox(paths), read_topology())
    assert control.pid() == os.getpid()
    control.start()
    control.start(first)
    with pytest.raises(LabError, match=r"runs already, and not with .*2\.toml") as error:
        control.start(second)
    assert "control-plane stop" in error.value.hint


@pytest.mark.behaviour("BUG-LB11")
@pytest.mark.parametrize("what", ["stop", "pause", "continue"])
def test_a_configuration_is_refused_by_commands_that_start_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vm_lab.cli.require_root", lambda: None)
    monkeypatch.setattr("vm_lab.cli.LabPaths", lambda _: paths_of(tmp_path))
    file = tmp_path / "1.toml"
    file.touch()
    result = CliRunner().invoke(main, ["control-plane", what, "--config", str(file)])
    assert result.exit_code == 2
    assert f"not for `{what}`" in result.output


def test_a_configuration_that_is_not_toml_reaches_the_control_plane_unchanged(
    tmp_path: Path,
) -> None:
    assert with_services("listen = \n", paths_of(tmp_path)) == "listen = \n"
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads("listen = \n")


@pytest.mark.behaviour("BUG-LB16")
def test_the_status_of_a_lab_reports_a_control_plane_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A paused one never answers: formerly the status ended with an error after minutes."""
    limits: list[float] = []

    def never(_: object, *words: str, within_s: float) -> str:
        limits.append(within_s)
        raise LabError(f"`twinectl {' '.join(words)}` did not end within {within_s:g} s")

    monkeypatch.setattr(LabControlPlane, "twinectl", never)
    control = LabControlPlane.__new__(LabControlPlane)
    states, error = agent_states(control)

    assert states == {}
    assert error == "`twinectl machine list` did not end within 10 s"
    assert limits == [10.0]
