"""Prints progress, each line with the seconds since the command began."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

PATIENCE_S = 600.0
"""Timeout of one step, in seconds. No step takes nearly as long on an idle machine; on a slow
machine a slow step must not count as failed."""


def wait_until(
    holds: Callable[[], bool], error: Callable[[], Exception], timeout_s: float = PATIENCE_S
) -> None:
    """Return once a condition holds. Raises the error if it does not hold within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise error()
        time.sleep(0.1)


class Progress:
    """Progress lines on stderr; results go to stdout and stay parseable."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        click.echo(f"[{time.monotonic() - self._began:6.1f} s] {text}", err=True)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Print what begins, and how long it took once it has succeeded."""
        began = time.monotonic()
        self.say(f"{text} …")
        yield
        self.say(f"{text}: done in {time.monotonic() - began:.1f} s")
