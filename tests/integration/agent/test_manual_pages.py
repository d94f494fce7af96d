"""Manual pages and completions are made from the parsers and are read without a warning."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agent.cli.root import cli
from control_plane.cli.root import main

PROGRAMS = {"twine-agent": cli, "twinectl": main}


def _words(group: click.Group, *before: str) -> list[str]:
    found = []
    for name, command in group.commands.items():
        if command.hidden:  # a former name: tests/unit/wire/test_former_names.py
            continue
        found.append(" ".join((*before, name)))
        if isinstance(command, click.Group):
            found += _words(command, *before, name)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_manual_page_has_every_command_and_option(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    page = tmp_path / f"{name}.1"
    page.write_text(CliRunner().invoke(program, ["manual"]).output)
    read = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-cbou", page], capture_output=True, check=True
    )
    text, warnings = read.stdout.decode(), read.stderr.decode()
    plain = page.read_text().replace("\\-", "-")

    assert warnings == ""
    assert f"{name}" in text
    assert [words for words in _words(program) if f".SS {words}" not in plain] == []
    options = [
        p.opts[0] for c in program.commands.values() for p in c.params if p.opts[0][0] == "-"
    ]
    assert [option for option in options if option not in plain] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_shell_takes_the_completion(name: str, tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(CliRunner().invoke(PROGRAMS[name], ["completion", "bash"]).output)
    shell_command = f"source {script}; complete -p {name}"
    done = subprocess.run(
        ["bash", "-c", shell_command], capture_output=True, check=False, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert name in done.stdout


def test_words_are_completed_from_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "_TWINE_AGENT_COMPLETE": "bash_complete",
        "COMP_WORDS": "twine-agent fac",
        "COMP_CWORD": "1",
    }
    done = CliRunner().invoke(cli, [], prog_name="twine-agent", env=env)

    assert done.output.splitlines() == ["plain,facts"]
