"""How programs behave if they cannot write their output, and with empty options."""

from __future__ import annotations

import errno
import io
import sys

import click
import pytest
from click.testing import CliRunner

from control_plane.cli import main
from control_plane.cli.program import Program
from wire.pipes import PipedGroup


@pytest.mark.behaviour("BUG-UX105")
def test_a_program_without_stdout_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly `twinectl job list >&-` ended with a traceback."""

    @click.group(cls=PipedGroup)
    def program() -> None:
        pass

    @program.command()
    def report() -> None:
        click.echo(sys.stdout.isatty())

    monkeypatch.setattr(sys, "stdout", None)
    program.main(["report"], standalone_mode=False)
    assert isinstance(sys.stdout, io.TextIOBase)
    sys.stdout.close()


@pytest.mark.behaviour("BUG-UX105")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_below_the_output_is_a_failure_not_wrong_use(number: int) -> None:
    """Formerly `twinectl job list >file` on a full disk ended with 64."""

    @click.group(cls=Program)
    def program() -> None:
        pass

    @program.command()
    def report() -> None:
        raise OSError(number, "it does not fit")

    found = CliRunner().invoke(program, ["report"])
    assert found.exit_code == 1
    assert "cannot write the output: it does not fit" in found.output


@pytest.mark.behaviour("BUG-UX108")
def test_an_empty_endpoint_is_not_the_default_one() -> None:
    """Formerly `--endpoint "$UNSET"` called the control plane of this host."""
    found = CliRunner().invoke(main, ["--endpoint", "", "job", "list"])
    assert found.exit_code == 64
    assert "--endpoint is empty" in found.output


@pytest.mark.behaviour("BUG-UX124")
@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("unix:", "the path of the socket is missing"),
        ("https:", "not an https:// or unix: address"),
        ("https://:7440", "the name of the host is missing"),
        ("https://cp.example:99999", "the port is not a number from 0 to 65535"),
    ],
)
def test_an_endpoint_without_an_address_is_refused_with_the_reason(endpoint: str, why: str) -> None:
    """Formerly `--endpoint unix:` ended with "Invalid argument" and `https:` with 77."""
    found = CliRunner().invoke(main, ["--endpoint", endpoint, "job", "list"])
    assert found.exit_code == 64
    assert why in found.output


@pytest.mark.behaviour("BUG-UX109")
def test_the_audit_log_is_queried_for_an_object_of_a_kind() -> None:
    """Formerly `audit --object web` printed an empty table."""
    found = CliRunner().invoke(main, ["audit", "--object", "web"])
    assert found.exit_code == 64
    assert "--object takes KIND/NAME such as job/web, not 'web'" in found.output


@pytest.mark.behaviour("BUG-UX166")
@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_question_that_is_not_confirmed_is_a_failure_with_a_reason(answer: str) -> None:
    """Formerly a command in a script, with no terminal, ended with 130 and without a word."""
    found = CliRunner().invoke(main, ["restored", "release"], input=answer)
    assert found.exit_code == 1
    assert "not confirmed: nothing was changed" in found.output
    assert "--yes" in found.output
