"""Each test finds the guest as nobody has touched it, and has to leave it so."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from the_host import OURS, STATE, TheHost, differences, everything


@pytest.fixture(scope="session")
def untouched() -> dict[str, str]:
    """The guest before the first profile, with what an agent that ran once leaves behind it."""
    subprocess.run(["systemctl", "start", "workload.slice"], check=True)
    for verb in ("start", "stop"):
        subprocess.run(["systemctl", verb, "twine-agent.service"], check=True)
    # Stay, with their sysctls, as after any mount and after the agent's first rule of a firewall.
    subprocess.run(["modprobe", "-a", "loop", "xfs", "nf_conntrack"], check=True)
    return everything()


@pytest.fixture
def host(untouched: dict[str, str]) -> Iterator[TheHost]:
    """The guest without a profile; afterwards every setting must be as it was."""
    shutil.rmtree(STATE, ignore_errors=True)
    shutil.rmtree(OURS, ignore_errors=True)
    OURS.mkdir()
    found = TheHost()
    yield found
    # Of a test that failed half-way: what the agent started would go on after the release.
    subprocess.run(["systemctl", "stop", "twine-agent", "twine-sidekick"], check=False)
    found.release()
    assert differences(untouched, everything()) == []
    assert found.state.load().originals == {}
    assert found.state.unfinished() is None
