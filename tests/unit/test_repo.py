"""The repository keeps its own rules: size of modules, no vague names, docs that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SKIPS = {"skip", "skipif", "skipIf", "skipUnless", "importorskip", "xfail", "SkipTest"}
PACKAGES = (
    "wire",
    "agent",
    "sidekick",
    "control_plane",
    "resolver",
    "conveyor",
    "taskcontrol",
    "vm_lab",
)
MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
MAX_LINES = 500
WAY_IN = {"README.md": 120, "CONTRIBUTING.md": 120, "ARCHITECTURE.md": 250}
VAGUE = {"utils", "helpers", "common", "manager", "base", "misc"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_is_short_and_named_by_its_content(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert path.stem not in VAGUE


def test_files_that_are_collected_together_have_unique_names() -> None:
    """Pytest imports files of folders without `__init__.py` by their file names only."""
    suites = ("unit", "property", "simulation", "integration", "contract")
    files = [p for suite in suites for p in (ROOT / "tests" / suite).rglob("*.py")]
    loose = [p.name for p in files if not (p.parent / "__init__.py").exists()]
    assert {n for n in loose if loose.count(n) > 1} - {"conftest.py"} == set()


@pytest.mark.behaviour("F-15")
def test_no_host_process_is_ever_signalled_by_its_pid() -> None:
    """PIDs are reused. Units and cgroups are not."""
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


def test_files_that_the_way_in_names_exist() -> None:
    """The introductory pages name files by a whole path or by the end of one (`core/decide.py`)."""
    places = ("agent", "control_plane", "conveyor", "resolver", "sidekick", "taskcontrol", "vm_lab")
    files = [p for place in (*places, "wire", "tests", "docs", "profiles") for p in _files(place)]
    files += [p.name for p in ROOT.iterdir() if p.is_file()]
    missing = []
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/questions.md"):
        for name in re.findall(r"`([\w./-]+\.(?:py|toml|json|md))`", (ROOT / page).read_text()):
            if not any(path == name or path.endswith(f"/{name}") for path in files):
                missing.append(f"{page}: {name}")
    assert missing == []


def _files(place: str) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in (ROOT / place).rglob("*.*") if p.is_file()]


def test_the_way_in_stays_short() -> None:
    lengths = {page: len((ROOT / page).read_text().splitlines()) for page in WAY_IN}
    assert {page: n for page, n in lengths.items() if n > WAY_IN[page]} == {}


def test_the_changelog_has_one_short_line_for_each_change() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 260] == []


def _is_a_skip(node: ast.AST) -> bool:
    """Return whether a name of pytest or unittest skips a test."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("pytest", "unittest") and any(n.name in SKIPS for n in node.names)
    if not isinstance(node, ast.Attribute) or node.attr not in SKIPS:
        return False
    return ast.unparse(node.value) in ("pytest", "pytest.mark", "unittest")


def _always_true(node: ast.expr) -> bool:
    """Return whether an expression is true whatever the code does."""
    match node:
        case ast.Constant(value=value):
            return bool(value)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(map(_always_true, values))
        case ast.BoolOp(values=values):
            return all(map(_always_true, values))
        case ast.Tuple(elts=elements):
            return bool(elements)
        case ast.GeneratorExp() | ast.Lambda():
            return True
        case ast.Call(func=ast.Name(id="all"), args=[ast.List(elts=[]) | ast.Tuple(elts=[])]):
            return True
        case ast.Compare(left=ast.Subscript(value=ast.Name(id="samples")), ops=[ast.GtE()]):
            return ast.unparse(node.comparators[0]) in ("0", "0.0")  # no metric is negative
    return False


def _found(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the kind of each skip and each assert that cannot fail."""
    for node in ast.walk(ast.parse(text)):
        if _is_a_skip(node):
            yield node.lineno, "skip"
        elif isinstance(node, ast.Assert) and _always_true(node.test):
            yield node.lineno, "assert"


@pytest.mark.parametrize(
    "line",
    [
        "pytest.skip('no root')",
        "@pytest.mark.skipif(True, reason='x')\ndef f(): ...",
        "np = pytest.importorskip('numpy')",
        "from pytest import skip",
        "assert x or True",
        "assert (x == 1, 'always')",
        "assert (y for y in z)",
        "assert samples['twine_tasks', 'pending'] >= 0",
    ],
)
def test_a_skip_and_an_assert_that_cannot_fail_are_found(line: str) -> None:
    assert len(list(_found(line))) == 1
    assert list(_found("assert x\nassert x >= 1\nassert x or y\nitems.skip(3)")) == []


@pytest.mark.behaviour("BUG-AU5", "BUG-AU7")
def test_no_test_is_skipped_and_no_assert_always_holds() -> None:
    """A suite that cannot run must fail."""
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {kind}"
        for path in TESTS
        for line, kind in _found(path.read_text())
    ]
    assert offenders == []
