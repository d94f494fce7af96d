"""The repository keeps its own rules: size of modules, no vague names, docs that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wire", "agent", "sidekick", "control_plane", "resolver", "taskcontrol", "vm_lab")
MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
MAX_LINES = 500
WAY_IN = {"README.md": 120, "CONTRIBUTING.md": 120, "CHANGELOG.md": 250, "ARCHITECTURE.md": 250}
VAGUE = {"utils", "helpers", "common", "manager", "base", "misc"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_is_short_and_named_by_what_it_holds(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert path.stem not in VAGUE


@pytest.mark.parametrize("together", [("unit", "property"), ("contract", "integration")])
def test_files_that_are_collected_together_have_names_of_their_own(together: tuple[str, ...]):
    """Pytest imports the files of folders without `__init__.py` by their names alone."""
    files = [p for suite in together for p in (ROOT / "tests" / suite).rglob("*.py")]
    loose = [p.name for p in files if not (p.parent / "__init__.py").exists()]
    assert {n for n in loose if loose.count(n) > 1} - {"conftest.py"} == set()


def test_no_host_process_is_ever_signalled_by_its_pid() -> None:
    """PIDs are reused; units and cgroups are not (F-15)."""
    offenders = [
        path.relative_to(ROOT)
        for path in MODULES
        if path.parts[len(ROOT.parts)] != "vm_lab" and "os.kill(" in path.read_text()
    ]
    assert offenders == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_the_questions_of_a_newcomer_lead_to_files_that_exist() -> None:
    page = (ROOT / "docs" / "questions.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| [A-Z]", line)]
    assert len(rows) == 10
    named = [path for row in rows for path in re.findall(r"`([\w/]+/[\w.]+)`", row[3])]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_way_in_stays_short() -> None:
    lengths = {page: len((ROOT / page).read_text().splitlines()) for page in WAY_IN}
    assert {page: n for page, n in lengths.items() if n > WAY_IN[page]} == {}
