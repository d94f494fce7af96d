"""TuneD's own profiles compared with ours, in a guest that has TuneD (tests/lab/with_tuned)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.one_guest import OneGuest


@pytest.mark.behaviour("BUG-SK20", "BUG-SK22")
@pytest.mark.long
def test_tuneds_profiles_do_the_same_converted() -> None:
    """The effective values are equal, and a rollback leaves nothing behind."""
    guest = OneGuest("bench", name="tuned")
    guest.up()
    guest.pytest("-s", inside=Path(__file__).parent / "with_tuned", timeout_s=2 * 3600)
    guest.down()
