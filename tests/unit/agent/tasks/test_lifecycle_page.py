"""docs/task-lifecycle.md and the code agree on states, reasons and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from builders import a_spec

from agent.api import Health, TaskState
from agent.machine import UnitState
from agent.tasks.core.exits import RESULTS, STEPS
from agent.tasks.exec import _exec_end

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "task-lifecycle.md").read_text()
UNUSED = {223, 234}
"""Numbers between 200 and 243 without a systemd meaning for services (systemd.exec(5))."""


def test_every_state_is_explained() -> None:
    rows = re.findall(r"^\| ([a-z]+) \| .+ \| .+ \|$", PAGE, flags=re.M)
    assert {state.value for state in TaskState} <= set(rows)
    assert all(health.value in PAGE for health in Health)


def test_every_reason_of_an_end_is_explained() -> None:
    assert [word for word in RESULTS if f"`{word}`" not in PAGE] == []


def test_every_exit_code_of_a_failed_start_is_explained_in_the_words_of_the_agent() -> None:
    rows = dict(re.findall(r"^\| (2\d\d) \| (.+) \|$", PAGE, flags=re.M))
    assert rows == {str(code): words for code, words in STEPS.items()}


def test_a_command_in_a_task_that_never_started_is_explained_in_the_same_words() -> None:
    page = (DOCS / "agent.md").read_text()
    (row,) = re.findall(r"^\| 203 \| (.+) \|$", page, flags=re.M)
    reported = _exec_end(UnitState("u", "failed", "failed", exit_code=203), a_spec()).detail
    assert f'"{reported}"' in row
    assert re.search(r"^\| 141 \| ", page, flags=re.M)


def test_each_exit_code_of_systemd_has_a_description() -> None:
    assert set(STEPS) == set(range(200, 244)) - UNUSED
