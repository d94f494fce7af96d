"""A client raises the error that the server raised, in a process of its own, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RAISES = """
from control_plane.cli.program import Target
from wire.errors import Problem, from_problem
Target("unix:/missing", None).client()
print(from_problem(Problem(code="{code}", status=500, detail="x")).exit_code)
"""


@pytest.mark.behaviour("BUG-UX143")
@pytest.mark.parametrize(("code", "exit_code"), [("quota_exceeded", 5), ("unknown_outcome", 75)])
def test_twinectl_knows_the_errors_of_the_control_plane(code: str, exit_code: int) -> None:
    """Their classes were in a module that twinectl does not load, so it ended with 1."""
    program = [sys.executable, "-c", _RAISES.format(code=code)]
    assert subprocess.run(program, capture_output=True, check=True).stdout == b"%d\n" % exit_code
