"""Each test starts with an untouched guest, and has to leave the guest unchanged."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from guest_host import OURS, STATE, GuestHost, differences, everything


@pytest.fixture(scope="session")
def untouched() -> dict[str, str]:
    """Return the guest's state before the first profile, with the leftovers of one agent run."""
    subprocess.run(["systemctl", "start", "workload.slice"], check=True)
    for verb in ("start", "stop"):
        subprocess.run(["systemctl", verb, "twine-agent.service"], check=True)
    # They stay loaded with their sysctls, as after any mount and after the agent's first firewall
    # rule.
    subprocess.run(["modprobe", "-a", "loop", "xfs", "nf_conntrack"], check=True)
    return everything()


@pytest.fixture
def host(untouched: dict[str, str]) -> Iterator[GuestHost]:
    """Yield the guest without a profile; afterwards every setting must have its old value."""
    shutil.rmtree(STATE, ignore_errors=True)
    shutil.rmtree(OURS, ignore_errors=True)
    OURS.mkdir()
    found = GuestHost()
    yield found
    # A failed test may leave runs of the agent behind, which would continue after the release.
    subprocess.run(["systemctl", "stop", "twine-agent", "twine-sidekick"], check=False)
    found.release()
    assert differences(untouched, everything()) == []
    assert found.state.load().originals == {}
    assert found.state.unfinished() is None
