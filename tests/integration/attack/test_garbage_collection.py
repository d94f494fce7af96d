"""Old garbage of a control plane is collected in short passes."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMON = """
import gc, weakref
from control_plane.runtime import garbage

class Connection:
    def __init__(self):
        self.itself = self

def promote(count):
    made = [[] for _ in range(count)]
    gc.collect(1)
    return made
"""


def run(code: str) -> None:
    """Run a function in a separate process: the collector is shared by the whole process."""
    subprocess.run([sys.executable, "-c", COMMON + code], check=True, timeout=120)


@pytest.mark.behaviour("BUG-HT21")
def test_a_cycle_that_became_old_is_collected() -> None:
    """Regression: 180 KB of each exec session was never released."""
    run("""
with garbage.permanent_heap():
    loaded = [[] for _ in range(100_000)]
gone = weakref.ref(one := Connection())
stays = promote(1000)
del one
for _ in range(400):
    stays.append([[] for _ in range(1000)])
    if gone() is None:
        break
assert gone() is None, gc.get_stats()
""")


def test_a_slow_full_collection_freezes_the_surviving_objects() -> None:
    """Objects created after the start become permanent once they are many."""
    run("""
garbage.MAX_PASS_S = 0.0
with garbage.permanent_heap():
    loaded = [[] for _ in range(1000)]
before = gc.get_freeze_count()
stays = promote(5000)
gc.collect()
assert gc.get_freeze_count() >= before + 5000
assert len(gc.get_objects(2)) < 5000
""")
