"""One lab for the whole suite: three booted VMs, the control plane, the demo's two images.

A lab that does not boot fails every test here; nothing is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab_client import NAME, LabClient
from vm_lab.image.app import VERSIONS, build_app

collect_ignore = [
    "in_guest",
    "bad_disks",
    "with_tuned",
]  # these run in guests: test_0_host_profiles.py, test_2_bad_disks.py, test_0_tuned.py


@pytest.fixture(scope="session")
def the_lab() -> Iterator[LabClient]:
    lab = LabClient()
    keep = bool(os.environ.get("TWINE_KEEP_LAB"))
    if not keep:
        lab.lab("down")
    lab.lab("up", timeout_s=1800)
    yield lab
    if not keep:
        lab.lab("down")  # fails if a process, namespace or mount is left
        assert not Path("/var/lib/twine-lab", NAME).exists()
        assert not Path("/run/twine-lab", NAME).exists()


@pytest.fixture(scope="session")
def images(the_lab: LabClient) -> dict[str, str]:
    """Version of the demo application → digest in the image store."""
    tars = {v: build_app(v, print) for v in VERSIONS}
    return {v: the_lab.ctl("image", "push", str(tar))["digest"] for v, tar in tars.items()}


@pytest.fixture(scope="session")
def entitlement(the_lab: LabClient) -> str:
    the_lab.ctl("entitlement", "create", "demo", "--machines", "3", "--host-profile", "web")
    return "demo"


@pytest.fixture
def web(the_lab: LabClient, images: dict[str, str], entitlement: str) -> LabClient:
    """Yield the lab at rest, with the demo's job: six tasks of version 1, two on each machine."""
    the_lab.spread(images["v1"], 6)
    return the_lab
