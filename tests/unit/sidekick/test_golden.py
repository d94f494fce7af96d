"""The exact output for recorded hosts, so that a review shows each change.

`TWINE_GOLDEN=write pytest tests/unit/sidekick/test_golden.py` writes the files again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_host import PROFILES
from recorded import NAMES, RecordedHost

from sidekick.cli import main

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"
SHIPPED = sorted(path.stem for path in PROFILES.glob("*.toml"))


def output_of(fake: RecordedHost, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the output of a command, without its duration."""
    options = [f"--root={fake.root}", f"--state={fake.state.folder}", f"--profiles={PROFILES}"]
    code = main([*options, *argv], make_host=lambda root: fake.host(root))
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in out.splitlines()]
    kept = ["\t".join([*row[:4], *row[5:]]) if len(row) == 6 else "\t".join(row) for row in lines]
    shown = kept if argv[0] != "plan" else out.splitlines()
    return "\n".join([f"$ sidekick {' '.join(argv)}", *shown, err.strip(), f"exit {code}"])


def check(name: str, parts: list[str]) -> None:
    path = GOLDEN / name
    text = "\n\n".join(parts) + "\n"
    if os.environ.get("TWINE_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("host", NAMES)
def test_the_plans_of_all_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    fake = RecordedHost(tmp_path, host)
    check(f"plans-{host}.txt", [output_of(fake, capsys, "plan", name) for name in SHIPPED])


@pytest.mark.parametrize("host", NAMES)
def test_a_switch_is_verified_and_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    fake = RecordedHost(tmp_path, host)
    steps = [
        "apply-profile turbo",
        "verify",
        "apply-profile latency",
        "verify",
        "rollback",
        "verify",
    ]
    check(f"switch-{host}.txt", [output_of(fake, capsys, *step.split()) for step in steps])
