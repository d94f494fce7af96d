"""Eight images that behave like the usual public ones run with the defaults on a booted guest."""

from __future__ import annotations

import pytest

from tests.compat.recipes import FIXED, recipes
from tests.compat.run import one_guest, tried


@pytest.mark.behaviour("AG4", "BUG-AG31", "BUG-AG39")
def test_usual_images_start_serve_log_stop_and_keep_their_data() -> None:
    """`make compat` runs all of them and writes docs/compatibility.md."""
    wanted = [recipe for recipe in recipes() if recipe.name in FIXED]
    found = {one["name"]: one for one in tried(one_guest(), wanted)}
    assert {name: one["problem"] for name, one in found.items() if "problem" in one} == {}
    assert sorted(found) == sorted(FIXED)
    keeping = {recipe.name for recipe in wanted if recipe.write}
    assert {name for name, one in found.items() if one.get("keeps")} == keeping
