"""The library for application owners needs no other package, and it documents the whole call."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.behaviour("TC17", "TC21")

ROOT = Path(__file__).parents[3]
OURS = {"wire", "agent", "control_plane", "resolver", "sidekick", "taskcontrol", "vm_lab"}
LOADED = """
import json, sys
import taskcontrol.api, taskcontrol.quorum, taskcontrol.shards, taskcontrol.stateless
import taskcontrol.windows, taskcontrol.server, taskcontrol.config, taskcontrol.cli
print(json.dumps(sorted(sys.modules)))
"""


def run(*arguments: str, path: Path = ROOT) -> str:
    """Run a Python that finds our packages only in `path`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=path,
        env={"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.behaviour("TC17")
def test_a_controller_needs_nothing_of_the_control_plane() -> None:
    """The test runs a separate process and checks its list of modules."""
    loaded = json.loads(run("-c", LOADED))
    ours = {module for module in loaded if module.split(".")[0] in OURS}
    others = {module for module in ours if not module.startswith(("taskcontrol", "wire"))}
    assert others == set()
    assert "taskcontrol.server" in ours


@pytest.mark.behaviour("TC17")
@pytest.mark.parametrize("kind", ["api", "quorum", "shards", "stateless", "windows"])
def test_a_rule_alone_needs_no_server(kind: str) -> None:
    """Decisions are plain functions of a request, so an owner can use another server."""
    code = f"import sys, json, taskcontrol.{kind}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run("-c", code)))
    assert {module for module in loaded if module.split(".")[0] in OURS - {"taskcontrol"}} <= {
        "wire",
        "wire.errors",
    }
    assert not {"aiohttp", "ssl", "click"} & loaded


@pytest.mark.behaviour("TC1", "TC2", "TC3", "TC21")
def test_the_document_of_the_call_is_all_that_another_language_needs() -> None:
    """The document has one call, with every field described and every name resolved."""
    document = json.loads(run("-m", "taskcontrol.cli", "openapi"))
    assert document["openapi"].startswith("3.")
    (call,) = (row["post"] for path, row in document["paths"].items() if path == "/v1/process")
    schemas = document["components"]["schemas"]

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(names, value.values()))
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    used = {name.rpartition("/")[2] for name in names(document)}
    assert used <= schemas.keys()
    assert "TaskControlRequest" in names_of(call["requestBody"])
    assert "TaskControlResponse" in names_of(call["responses"]["200"])
    for field in ("id", "task", "kind", "cause", "deadline", "instead", "notice"):
        assert field in schemas["TaskOperation"]["properties"]
    for field in ("id", "machine", "tasks", "start", "deadline", "expectedDurationS"):
        assert field in schemas["AdvanceNotice"]["properties"]


def names_of(part: object) -> str:
    return json.dumps(part)
