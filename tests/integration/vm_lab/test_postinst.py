"""The output of dpkg for an agent that does not start; stand-ins replace the host's programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vm_lab.package import RECIPE

PROGRAMS = {
    "systemctl": 'case "$*" in is-active*) echo failed ;; show*) echo 1d2e ;;'
    " restart*agent*) exit 1 ;; esac",
    "systemd-sysusers": "",
    "journalctl": 'case "$*" in *_SYSTEMD_INVOCATION_ID=1d2e*) echo too new ;;'
    " *) echo of before ;; esac",
}


@pytest.mark.behaviour("F-07")
def test_the_operator_reads_only_the_output_of_the_failed_start(
    tmp_path: Path,
) -> None:
    """Regression: the last line of the previous run was printed before the reason."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = (RECIPE / "postinst").read_text().replace("@REPLACED@", "")
    script = script.replace("/run/systemd/system", str(tmp_path))
    done = subprocess.run(
        ["sh", "-c", script, "postinst", "configure", "0.3.0"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "twine-agent: the agent does not start; tasks run on. Why:",
        "too new",
        "twine-agent: mend that, then: dpkg --configure twine-agent",
    ]
