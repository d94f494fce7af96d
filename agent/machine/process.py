"""Runs programs of the host; no other module starts one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, cast

from agent.machine import Completed
from wire.errors import ProgramError


def has_program(path: str) -> bool:
    """Return whether an executable program exists at a path."""
    return os.access(path, os.X_OK)


class HostProcesses:
    """Runs programs directly, never through a shell."""

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True) -> Completed:
        """Run a program to its end and return its output."""
        import subprocess  # here and below, because most runs of sidekick start no program

        name = argv[0]
        try:
            done = subprocess.run(
                list(argv),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError as e:
            raise ProgramError(
                f"cannot run {name}: no such program", hint=f"install what provides {name}"
            ) from e
        except subprocess.TimeoutExpired as e:
            raise ProgramError(f"{' '.join(argv)} did not end within {timeout_s:g} s") from e
        except (OSError, ValueError) as e:
            raise ProgramError(f"cannot run {name}: {e}") from e
        result = Completed(
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )
        if check and result.code:
            last = (result.stderr or result.stdout).strip().splitlines()[-1:]
            reason = last[0] if last else "it printed nothing"
            raise ProgramError(f"{' '.join(argv)} failed with {result.code}: {reason}")
        return result

    def lines(self, argv: Sequence[str]) -> ProgramLines:
        """Start a program and return its lines as they come."""
        return ProgramLines(argv)


class ProgramLines:
    """The output of a running program, line by line."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Start the program."""
        import subprocess

        self._argv, self._closed = argv, False
        # A memory file, because a pipe without a reader may fill and a disk may be full.
        self._errors = os.fdopen(os.memfd_create("errors", os.MFD_CLOEXEC), "w+b")
        try:
            self._child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as e:
            self._errors.close()
            raise ProgramError(f"cannot run {argv[0]}: {e.strerror}") from e

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines until the program ends; raise `ProgramError` if it failed unclosed."""
        assert self._child.stdout is not None
        with self._errors, self._child.stdout as output:
            yield from output
            code = self._child.wait()
            if code and not self._closed:
                self._errors.seek(0)
                errors = self._errors.read().decode(errors="replace").strip().splitlines()
                why = errors[-1] if errors else "it did not print a reason"
                raise ProgramError(f"{' '.join(self._argv)} failed with {code}: {why}")

    def close(self) -> None:
        """End the program; safe from any thread."""
        self._closed = True
        self._child.kill()
        self._child.wait()


@contextmanager
def filtered(argv: Sequence[str], source: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the output of a program that filters a file; raise `ProgramError` if it fails.

    A failure shows only at the end of the output, so the block must read all of it.
    """
    import subprocess

    try:
        child = subprocess.Popen(
            list(argv), stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as e:
        raise ProgramError(
            f"cannot run {argv[0]}: {e.strerror}", hint=f"install what provides {argv[0]}"
        ) from e
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        yield cast(BinaryIO, child.stdout)
        errors = child.stderr.read().decode(errors="replace").strip()
        if child.wait():
            raise ProgramError(f"{' '.join(argv)} failed with {child.returncode}: {errors}")
    finally:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        child.kill()
        child.wait()
