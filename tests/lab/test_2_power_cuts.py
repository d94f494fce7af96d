"""The power of a host is cut at random moments; `make power-cuts` does 50 of them."""

from __future__ import annotations

import pytest

from tests.lab.one_guest import OneGuest


@pytest.mark.behaviour("F-36", "F-42")
@pytest.mark.long
def test_f36_after_each_power_cut_all_is_as_promised_and_fsck_clean() -> None:
    """Acknowledged tasks run, and stopped tasks stay away."""
    guest = OneGuest(name="cuts")
    guest.lab("down")
    try:
        print(guest.lab("power-cuts", "--cuts", "3", "--seed", "36", timeout_s=2 * 3600))
    finally:
        guest.down()
