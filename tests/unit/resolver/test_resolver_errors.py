"""The addresses that are written to a proxy's file, and options of the resolver."""

from __future__ import annotations

import asyncio
import socket

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from pytest_mock import MockerFixture
from test_dns import WEB

from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.watch import EndpointChanges
from resolver import proxies, proxy_file
from resolver.cli import main
from resolver.endpoint_follower import EndpointFollower

SERVICES = [proxies.parse_service("web:http")]
NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
DNS_FAILED = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.mark.behaviour("BUG-AG76")
@pytest.mark.parametrize(
    ("host", "answer", "is_written"),
    [
        ("m7.example", None, True),
        ("m7.example", NO_SUCH_NAME, False),
        ("m7.example", DNS_FAILED, True),
        ("m7..example", UnicodeError("label empty or too long"), False),
        ("h;\n} evil", None, False),
        ("fe80::1%eth0", None, False),
    ],
)
async def test_a_task_that_no_proxy_can_reach_does_not_block_the_others(
    mocker: MockerFixture, host: str, answer: Exception | None, is_written: bool
) -> None:
    """A proxy refuses a whole file with a name that does not exist."""
    listed = [WEB[0], replace(WEB[1], host=host)]
    known = await _known(mocker, listed=listed, answer=answer)
    text = proxies.shipped_template("haproxy.cfg.j2")(SERVICES, known)
    assert "server web-0 192.0.2.1:20000" in text
    assert (f"server web-1 {host}:20001" in text) == is_written


async def _known(
    mocker: MockerFixture, *, listed: list[Endpoint], answer: Exception | None
) -> proxies.Known:
    async def watch(*_: object) -> EndpointChanges:
        endpoints = Endpoints(job="web", revision=1, endpoints=listed)
        return EndpointChanges(changed=[endpoints], missing=[])

    loop = asyncio.get_running_loop()
    mocker.patch.object(loop, "getaddrinfo", side_effect=answer, return_value=[])
    follower = EndpointFollower(watch)
    following = asyncio.ensure_future(follower.run())
    try:
        return await proxy_file.usable_endpoints(follower, SERVICES, 5.0)
    finally:
        following.cancel()


@pytest.mark.behaviour("BUG-AG88")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("proxy", "haproxy", "web:http", "--file=twine.cfg", "--check=haproxy 'x"),
            '--check "haproxy \'x" is not a command: No closing quotation',
        ),
        (("dns", "--listen=a..b:0"), "cannot listen at a..b:0: "),
    ],
)
def test_an_option_that_cannot_be_used_is_named(words: tuple[str, ...], message: str) -> None:
    """The program ended with a traceback."""
    done = CliRunner().invoke(main, ["--endpoint", "unix:/none", *words])
    assert done.exit_code != 1
    assert message in done.output
