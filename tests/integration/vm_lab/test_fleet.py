"""The simulated fleet with few agents: real ones over TLS; `twine-lab fleet` runs hundreds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from control_plane.cli import main as twinectl
from vm_lab.cli import main


@pytest.mark.behaviour("HC10", "SC1")
def test_real_agents_join_are_given_tasks_updated_and_a_third_of_them_lost() -> None:
    """The tasks of lost hosts run on the others."""
    result = CliRunner().invoke(main, ["fleet", "--agents", "4", "--tasks", "6", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["agents"], found["tasks"]) == (4, 6)
    assert {"join_s", "deploy_s", "update_s", "recover_s", "rss_mb"} <= found.keys()


@pytest.mark.parametrize("name", ["dev", "fleet", "power-cuts", "region"])
def test_commands_that_import_the_control_plane_are_listed_and_found(name: str) -> None:
    assert name in CliRunner().invoke(main, ["--help"]).output
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


@pytest.mark.behaviour("BUG-UX100")
def test_make_dev_prints_an_endpoint_that_answers_and_ends_on_ctrl_c() -> None:
    """`make dev` runs the production control plane and agents, without a VM."""
    argv = (sys.executable, "-c", "from vm_lab.cli import main; main()", "dev", "--agents", "3")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, bufsize=1) as dev:
        try:
            assert dev.stdout is not None
            lines = iter(dev.stdout.readline, "")
            endpoint = next(line.split("=", 1)[1].strip() for line in lines if "ENDPOINT=" in line)
            found = CliRunner().invoke(twinectl, ["--endpoint", endpoint, "job", "status", "web"])
            assert found.exit_code == 0
            assert "1/1 healthy" in found.output
            words = ("--endpoint", endpoint, "task", "exec", "web-0", "--", "ls")
            session = CliRunner().invoke(twinectl, words)  # BUG-UX100: it stayed forever
            assert session.exit_code == 1
            assert "a machine in memory runs no program" in session.stderr
            dev.send_signal(signal.SIGINT)
            assert dev.wait() == 0
        finally:
            dev.kill()


_BUILD = """
import tempfile, time
from vm_lab.cli import main

@main.command("build-long")
def build_long():
    with tempfile.TemporaryDirectory() as folder:
        print(folder, flush=True)
        time.sleep(600)

main(["build-long"])
"""


@pytest.mark.behaviour("BUG-UX111")
def test_a_command_that_is_terminated_removes_its_files() -> None:
    """Regression: SIGTERM left the temporary folder of `twine-lab image` behind."""
    argv = (sys.executable, "-c", _BUILD)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, bufsize=1) as build:
        try:
            assert build.stdout is not None
            folder = Path(build.stdout.readline().strip())
            assert folder.is_dir()
            build.send_signal(signal.SIGTERM)
            assert build.wait() == 1
            assert not folder.exists()
        finally:
            build.kill()
