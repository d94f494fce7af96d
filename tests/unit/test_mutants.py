"""The bugs that `make mutants` plants match the present code."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/mutants"


def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("mutants", str(TOOL))
    spec = importlib.util.spec_from_loader("mutants", loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = made
    loader.exec_module(made)
    return made


MUTANTS = tool().MUTANTS


@pytest.mark.behaviour("AL11")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_planted_bug_changes_existing_code(mutant):
    changed = tool().planted(mutant)
    compile(changed, mutant.path, "exec")
    assert all((TOOL.parents[1] / path).exists() for path in mutant.tests)


def test_the_checks_plant_a_few():
    assert sum(mutant.few for mutant in MUTANTS) >= 3
    assert "tools/mutants --few" in (TOOL.parent / "run-suites").read_text()
