"""The proxy of a lab."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vm_lab.control import LabControlPlane
from vm_lab.errors import LabError
from vm_lab.proxy import Proxy
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths
from vm_lab.topology import read_topology


@pytest.mark.behaviour("BUG-LB9")
def test_a_proxy_for_an_unknown_job_leaves_the_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the running proxy was ended before the job was looked up."""
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    proxy = Proxy(LabControlPlane(LabSandbox(paths), read_topology()))
    ended: list[Path] = []
    refused = SimpleNamespace(returncode=3, stdout="", stderr="there is no job 'wbe'\n")
    monkeypatch.setattr("vm_lab.proxy.end_process", ended.append)
    monkeypatch.setattr("vm_lab.proxy._haproxy", lambda: "haproxy")
    monkeypatch.setattr("vm_lab.proxy.subprocess.run", lambda *_, **__: refused)
    monkeypatch.setattr("vm_lab.proxy.program", lambda name: Path(name))
    with pytest.raises(LabError, match="there is no job 'wbe'"):
        proxy.start(["wbe:http"])
    assert ended == []
