"""A host whose disk is slow or fails: `bad_disks` runs inside the guest, on device-mapper."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

FOLDER = Path(__file__).parent / "bad_disks"


@pytest.mark.behaviour("F-04", "F-35", "F-36", "F-37", "F-41")
@pytest.mark.long
def test_an_agent_on_a_bad_disk() -> None:
    """P9"""
    guest = OneGuest(name="bad-disks")
    guest.up()
    try:
        guest.put("/root/image.tar", busybox_image())
        guest.pytest("-s", inside=FOLDER)
    finally:
        guest.down()
