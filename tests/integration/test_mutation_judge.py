"""Randomly selected code changes are judged by the tests that reach them."""

from tests.mutation.run import judged, rows_of
from tests.mutation.sites import drawn

CODE = """
def is_adult(age):
    return age >= 18


def most(first, second):
    return max(first, second)


def unused(count):
    return count + 1


def wait(left):
    while left > 0:
        left -= 1
"""
OWN = """
from room import is_adult


def test_of_age():
    assert is_adult(30)
    assert not is_adult(2)
"""
WIDER = "from room import most\n\ndef test_of_most():\n    assert most(1, 2) == 2\n"


def test_each_change_is_judged_by_the_tests_that_reach_it(tmp_path):
    """The own tests of a room run first, then those of several; code without tests is reported."""
    tree = tmp_path / "tree"
    for path, text in {"room.py": CODE, "own/test_own.py": OWN, "all/test_all.py": WIDER}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    rooms = {"room": (["room.py"], ["own"])}
    mutants = drawn(tree, {"room": ["room.py"]}, 1000, seed=1)
    wanted = [m for m in mutants if "left" not in m.before]
    assert judged(tmp_path, mutants, wanted, rooms, ["all"], []), (tmp_path / "log").read_text()
    outcomes = {
        (row["operator"], row["before"]): (row["outcome"], row["by"])
        for row in rows_of(mutants, tmp_path)
    }
    assert outcomes["boundary", "age >= 18"] == ("survived", "")
    assert outcomes["constant + 1", "18"] == ("survived", "")
    assert outcomes["dropped", "return age >= 18"] == ("killed", "own/test_own.py::test_of_age")
    assert outcomes["min/max", "max(first, second)"] == ("killed", "all/test_all.py::test_of_most")
    assert outcomes["arithmetic", "count + 1"] == ("not reached", "")
    assert outcomes["boundary", "left > 0"] == ("not judged", "")
