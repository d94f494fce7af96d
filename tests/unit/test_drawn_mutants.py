"""Seeded changes of the code: what can be changed, and how a switch turns a change on."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutation.run import REASONS, ROOMS, ROOT, table
from tests.mutation.sites import Mutant, drawn, plant

CODE = '''"""A module."""
from __future__ import annotations

LIMIT = 3


def room(free: int, taken: int = 0) -> int:
    """Return what is left."""
    if not free:
        return 0
    return min(free - taken, LIMIT)


def is_full(free: int, asked: bool) -> bool:
    if free < 1 and asked:
        return True
    log.info("not full")
    return False


def names(found: list[str]) -> list[str]:
    return [name for name in found if name]
'''


def planted(folder: Path, code: str = CODE) -> tuple[list[Mutant], ModuleType, ModuleType]:
    """Return all changes of a module, the module with these changes, and the module of their
    switch."""
    (folder / "module.py").write_text(code)
    mutants = drawn(folder, {"room": ["*.py"]}, 1000, seed=1)
    plant(folder, mutants)
    return mutants, load(folder, "module"), sys.modules["mutation_switch"]


def load(folder: Path, name: str) -> ModuleType:
    if name != "mutation_switch":
        sys.modules["mutation_switch"] = load(folder, "mutation_switch")
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("operator", "before", "call", "expected", "otherwise"),
    [
        ("boundary", "free < 1", ("is_full", 1, True), False, True),
        ("and/or", "free < 1 and asked", ("is_full", 0, False), False, True),
        ("condition negated", "if free < 1 and asked:", ("is_full", 0, True), True, False),
        ("condition negated", "for name in found if name", ("names", ["a"]), ["a"], []),
        ("arithmetic", "free - taken", ("room", 2, 1), 1, 3),
        ("constant + 1", "1", ("is_full", 1, True), False, True),
        ("constant - 1", "1", ("is_full", 0, True), True, False),
        ("not removed", "not free", ("room", 2), 2, 0),
        ("min/max", "min(free - taken, LIMIT)", ("room", 2), 2, 3),
        ("dropped", "return min(free - taken, LIMIT)", ("room", 2), 2, None),
        ("dropped", "return True", ("is_full", 0, True), True, False),
    ],
)
def test_a_change_is_made_when_its_switch_is_on(
    tmp_path, operator, before, call, expected, otherwise
):
    mutants, module, switch = planted(tmp_path)
    module.log = type("Log", (), {"info": lambda *_: None})
    [number] = [m.number for m in mutants if (m.operator, m.before) == (operator, before)]
    name, *arguments = call
    assert getattr(module, name)(*arguments) == expected
    assert number in switch.passed
    switch.number = number
    assert getattr(module, name)(*arguments) == otherwise


def test_lines_of_the_log_settings_and_annotations_are_not_changed(tmp_path):
    mutants, _, _ = planted(tmp_path)
    assert not [m for m in mutants if "log.info" in m.before or m.line < 8]


def test_a_seed_draws_the_same_changes_from_every_room():
    globs = {room: ROOMS[room][0] for room in ("health", "task control")}
    first = drawn(ROOT, globs, 20, seed=1)
    assert drawn(ROOT, globs, 20, seed=1) == first != drawn(ROOT, globs, 20, seed=2)
    assert [m.room for m in first] == ["health"] * 10 + ["task control"] * 10


def test_rooms_with_all_drawn_changes_are_code(tmp_path):
    mutants = drawn(ROOT, {room: globs for room, (globs, _) in ROOMS.items()}, 200, seed=1)
    for path in {m.path for m in mutants}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    plant(tmp_path, mutants)
    texts = [(tmp_path / path).read_text() for path in {m.path for m in mutants}]
    assert all(ast.parse(text) for text in texts)
    assert sum(text.count("_mutation.on(") for text in texts) >= len(mutants) == 200
    assert all((ROOT / path).exists() for _, tests in ROOMS.values() for path in tests)


def test_an_unnoticed_mutant_is_shown_with_its_reason():
    row = {"room": "health", "number": 3, "line": 7, "key": "a.py: boundary: x < 1 → x <= 1"}
    shown = table([row | {"outcome": "survived"}], {row["key"]: "x is never 1"})
    assert "health             0 of   1 noticed" in shown
    assert "x is never 1" in shown
    assert "survived" in shown
    assert REASONS.exists()
