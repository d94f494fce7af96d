"""An output that can be opened by name: the shell that makes the pipe, run for real."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from agent.images.core.standard_output import piped

SHELLS = (["/bin/sh"], ["/bin/busybox", "sh"], ["/bin/bash"])


def said(shell: list[str], script: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a script behind a pipe, run by a shell."""
    argv = [*shell, *piped(["/bin/sh", "-c", script])[1:]]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
    )
    return done.returncode, done.stdout.decode().splitlines()


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_written_by_name_comes_in_order_with_the_rest(shell: list[str]) -> None:
    """BUG-AG39: with a socket, `echo x > /dev/stdout` fails with ENXIO."""
    code, lines = said(
        shell, "echo a; echo b >/dev/stdout; echo c >>/dev/stderr; echo d >&2; exit 7"
    )
    assert (code, lines) == (7, ["a", "b", "c", "d"])


@pytest.mark.parametrize("shell", SHELLS)
def test_the_program_keeps_its_number_and_has_no_child_that_it_does_not_know(
    shell: list[str],
) -> None:
    """BUG-AG39: signals reach the program itself, and it waits for nobody else's child."""
    argv = piped(["/bin/sh", "-c", 'echo $$ "$(cat /proc/$$/task/*/children)x"; exec sleep 20'])
    with subprocess.Popen([*shell, *argv[1:]], stdout=subprocess.PIPE) as found:
        assert found.stdout is not None
        number, children = found.stdout.readline().decode().split(maxsplit=1)
        assert (int(number), len(children.split())) == (found.pid, 2), "its own substitution, and x"
        os.kill(found.pid, signal.SIGTERM)
        assert found.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("shell", SHELLS)
def test_the_last_words_are_told_though_all_are_told_to_end(shell: list[str]) -> None:
    """BUG-AG39: systemd signals all that is left once the program has ended."""
    script = "trap '' TERM; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo $i; done; kill -TERM 0"
    argv = [*shell, *piped(["/bin/sh", "-c", script])[1:]]
    found = subprocess.run(
        argv, stdout=subprocess.PIPE, timeout=60, check=False, start_new_session=True
    )
    assert found.stdout.decode().split() == [str(n) for n in range(1, 2001)]


def test_an_image_without_the_programs_for_it_is_run_as_before() -> None:
    script = "PATH=/nowhere; " + piped(["/bin/echo", "x"])[2]
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", "/bin/echo", "x"], capture_output=True, check=True
    )
    assert done.stdout == b"x\n"
