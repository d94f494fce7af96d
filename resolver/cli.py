"""`twine-resolver`: publishes the addresses of jobs for DNS clients and proxies."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import click
from dns import name as dns_name
from dns.exception import DNSException

from control_plane.cli.program import Program, Target, target_options
from resolver import proxies
from resolver.dns_message import Zone
from resolver.dns_server import DnsServer
from resolver.endpoint_follower import EndpointFollower
from resolver.proxy_file import ProxyFile, keep_up_to_date, usable_endpoints
from wire import log as logs
from wire import units
from wire.errors import Busy, InvalidInput, Unreachable
from wire.quantity_fields import TEXT_ENCODING

Work = Callable[[EndpointFollower, asyncio.Event], Awaitable[None]]
"""A function of a follower, and of an event that is set with each change."""
MAX_TTL_S = 3600
FIRST_ANSWER_S = 5.0


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster", prog_name="twine-resolver")
@target_options
def main() -> None:
    """Publish the addresses of jobs: as DNS, or as configuration of HAProxy and nginx.

    The last known addresses stay in force while the control plane is unavailable.
    """


@main.command()
@click.option("--listen", default="127.0.0.1:5353", show_default=True, metavar="HOST:PORT")
@click.option("--zone", default="twine.internal", show_default=True, help="Its zone of DNS.")
@click.option(
    "--ttl",
    default="1s",
    show_default=True,
    help="Time for which an answer may be cached; at most the jobs' update.drain_s.",
)
@click.pass_obj
def dns(target: Target, listen: str, zone: str, ttl: str) -> None:
    """Answer A, AAAA and SRV for the names of jobs, over UDP and TCP.

    JOB.ZONE has the addresses of all tasks that clients may call, TASK.JOB.ZONE that of one,
    and _PORT._tcp.JOB.ZONE their ports (SRV).
    """
    host, port = _address(listen)
    of = Zone(_zone(zone), _ttl(ttl))

    async def work(follower: EndpointFollower, _: asyncio.Event) -> None:
        async with DnsServer(of, follower.get).listening(host, port) as chosen:
            click.echo(f"answers for {of.text()} at {host}:{chosen}", err=True)
            await asyncio.Event().wait()

    _run_with_follower(target, work)


@main.command()
@click.argument("kind", metavar="haproxy|nginx|TEMPLATE.j2")
@click.argument("services", nargs=-1, required=True, metavar="JOB:PORT[=ADDRESS:NUMBER]…")
@click.option(
    "--file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep this file up to date until SIGTERM; without it, print once and end.",
)
@click.option(
    "--check",
    default="",
    metavar="COMMAND",
    help="Command that must accept {file} before it is used.",
)
@click.option(
    "--reload",
    default="",
    metavar="COMMAND",
    help="Command that makes the proxy read the file again.",
)
@click.pass_obj
def proxy(
    target: Target,
    kind: str,
    services: tuple[str, ...],
    file: Path | None,
    check: str,
    reload: str,
) -> None:
    """Write the addresses of ports of jobs, for a proxy to forward to.

    `web:http` names the port `http` of job `web`; with `=:8080` the proxy also listens there.
    A file that ends in .j2 is a jinja2 template for another proxy (docs/discovery.md).
    """
    render = _render(kind)
    wanted = proxies.parse_services(services)
    if file is None and (check or reload):
        raise InvalidInput("--check and --reload are about a file", hint="add --file FILE")
    commands = _command_words("--check", check), _command_words("--reload", reload)
    if file is None:
        work = _print_once(render, wanted)
    else:
        work = _keep_file(render, wanted, ProxyFile(file, *commands))
    _run_with_follower(target, work)


def _command_words(option: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as e:
        raise InvalidInput(f"{option} {command[:100]!r} is not a command: {e}") from e


def _render(kind: str) -> proxies.Render:
    if name := proxies.FORMATS.get(kind):
        return proxies.shipped_template(name)
    if not kind.endswith(".j2"):
        raise InvalidInput(
            f"{kind!r} is not a known proxy; known are {', '.join(proxies.FORMATS)}",
            hint="for another one give a jinja2 template, a file that ends in .j2",
        )
    try:
        text = Path(kind).read_text(TEXT_ENCODING)
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"cannot read template {kind}: {e}") from e
    return proxies.compile_template(text, kind)


def _keep_file(
    render: proxies.Render, wanted: Sequence[proxies.ProxiedService], file: ProxyFile
) -> Work:
    """Return the work that keeps a file until it is cancelled."""

    async def work(follower: EndpointFollower, changed: asyncio.Event) -> None:
        click.echo(f"keeps {file.path}", err=True)
        await keep_up_to_date(follower, changed, wanted, render, file)

    return work


def _print_once(render: proxies.Render, wanted: Sequence[proxies.ProxiedService]) -> Work:
    """Return the work that prints the configuration once."""

    async def work(follower: EndpointFollower, _: asyncio.Event) -> None:
        try:
            known = await usable_endpoints(follower, wanted, FIRST_ANSWER_S)
        except Busy as e:
            raise Unreachable(str(e)) from e
        click.echo(render(wanted, known), nl=False)

    return work


def _run_with_follower(target: Target, work: Work) -> None:
    """Run `work` and a follower until the work ends or SIGTERM comes."""

    async def run() -> None:
        changed = asyncio.Event()
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(target.client())
            follower = EndpointFollower(client.watch_endpoints, changed.set)
            working = asyncio.ensure_future(work(follower, changed))
            following = asyncio.ensure_future(follower.run())
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
            await asyncio.wait([working, following], return_when=asyncio.FIRST_COMPLETED)
            for task in (working, following):
                task.cancel()
            done = await asyncio.gather(working, following, return_exceptions=True)
            for end in done:
                if isinstance(end, Exception):
                    raise end

    logs.configure("twine-resolver", "info")
    asyncio.run(run())


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidInput(f"{text[:100]!r} is not a listen address", hint="HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def _zone(text: str) -> dns_name.Name:
    try:
        name = dns_name.from_text(text)
    except DNSException as e:
        raise InvalidInput(f"{text[:100]!r} is not a name of a zone: {e}") from e
    if name == dns_name.root:
        raise InvalidInput("the root cannot be the zone of jobs", hint="--zone twine.internal")
    return name


def _ttl(text: str) -> int:
    value = units.seconds(text)
    if not 0 <= value <= MAX_TTL_S or value != int(value):
        raise InvalidInput(f"--ttl {text} is not from 0s to 1h, in whole seconds")
    return int(value)


if __name__ == "__main__":
    main()
