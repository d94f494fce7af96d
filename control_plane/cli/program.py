"""How the program is called and ends: endpoint, credential, exit codes."""

from __future__ import annotations

import asyncio
import errno
import functools
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from control_plane.cli import show
from wire import tls
from wire.error_text import not_utf8
from wire.errors import Forbidden, InvalidInput, TwineError
from wire.pipes import PipedGroup

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient
    from wire.client import WireClient

T = TypeVar("T")
C = TypeVar("C", bound="WireClient")

DEFAULT_ENDPOINT = "unix:/run/twine/control-plane.sock"
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True, slots=True)
class Target:
    """The front end to call, and the credential to call it with."""

    endpoint: str | None
    credential: Path | None

    def client(self) -> ControlPlaneClient:
        """Return a client, or raise why none can be made."""
        from control_plane.client import ControlPlaneClient
        from wire.client import check_endpoint

        if self.endpoint is not None:
            check_endpoint(self.endpoint)
        if self.credential is None:
            endpoint = self.endpoint or DEFAULT_ENDPOINT
            if endpoint.startswith("https:"):
                raise Forbidden(
                    f"calling {endpoint} needs a credential",
                    hint="pass --credential FILE, made by `twine-control-plane user add`",
                )
            return ControlPlaneClient(endpoint)
        held = tls.load(self.credential)
        if held.not_after <= time.time():
            raise Forbidden(
                f"the credential {self.credential} of {held.name} has expired",
                hint="create a new one: twine-control-plane user add NAME --out FILE",
            )
        endpoint = self.endpoint or held.url
        return ControlPlaneClient(endpoint, tls.client_context(held, tls.API_SERVERS))

    def ask(self, work: Callable[[ControlPlaneClient], Awaitable[T]]) -> T:
        """Call the front end and return its answer."""
        return ask(self.client, work)

    def show(
        self,
        output: str,
        work: Callable[[ControlPlaneClient], Awaitable[T]],
        lines: Callable[[T], object],
    ) -> T:
        """Call the front end, print its answer (as JSON, or as text by `lines`) and return it."""
        found = self.ask(work)
        show.emit(output, found, lambda: lines(found))
        return found


def refuse_others(flag: str, fits: Collection[str], why: str) -> None:
    """Raise if an option whose name is not in `fits` is given together with a flag."""
    context = click.get_current_context()
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name is not None
        and option.name not in fits
        and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"{flag} cannot be given with {', '.join(given)}: {why}")


def ask(connect: Callable[[], C], work: Callable[[C], Awaitable[T]]) -> T:
    """Return the result of work with a client, which is closed afterwards."""

    async def call() -> T:
        async with connect() as client:
            return await work(client)

    return asyncio.run(call())


def shows_answer(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command its `Target`, and `--output` for the form of the answer."""
    return show.output_option(click.pass_obj(command))


def options(*given: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that applies several; help lists their options in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


class Program(PipedGroup):
    """A group of commands that ends with the exit codes of docs/operating.md.

    2 is not used for errors: it means "changes pending".
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; every expected failure becomes a few lines and an exit code."""
        kwargs["standalone_mode"] = False
        raise SystemExit(self._run(*args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> int:
        try:
            result = super().main(*args, **kwargs)
            return result if isinstance(result, int) else 0
        except click.ClickException as e:
            e.show()
            return EXIT_USAGE
        except TwineError as e:
            show.failure(e)
            return e.exit_code
        except (click.Abort, KeyboardInterrupt) as e:
            if isinstance(e, click.Abort) and e.__cause__ is None:  # the answer to a question
                show.failure(
                    TwineError("not confirmed: nothing was changed", hint="--yes confirms it")
                )
                return TwineError.exit_code
            return EXIT_INTERRUPTED
        except UnicodeEncodeError as e:
            show.failure(InvalidInput(not_utf8(e)))
            return EXIT_USAGE
        except OSError as e:
            if e.errno in _DISK_ERRORS:
                show.failure(TwineError(f"cannot write the output: {e.strerror}"))
                return TwineError.exit_code
            show.failure(InvalidInput(f"cannot use {e.filename or 'a file'}: {e.strerror or e}"))
            return EXIT_USAGE


def target_options(group: Callable[[], None]) -> Callable[..., None]:
    """Give the root of a program the options for the front end and the credential."""

    @click.option(
        "--endpoint",
        envvar="TWINE_ENDPOINT",
        metavar="URL",
        help=f"https://HOST:PORT or unix:/PATH [default: {DEFAULT_ENDPOINT}, or the credential's]",
    )
    @click.option(
        "--credential",
        envvar="TWINE_CREDENTIAL",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="From `twine-control-plane user add`; not needed on the unix socket.",
    )
    @click.pass_context
    @functools.wraps(group)
    def root(context: click.Context, endpoint: str | None, credential: Path | None) -> None:
        if endpoint == "":
            raise click.UsageError("--endpoint is empty; leave it out for the default")
        context.obj = Target(endpoint, credential)
        group()

    return root
