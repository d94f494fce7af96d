"""Controllers that are written in a file: what is refused, and what a good one answers."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from controller_requests import a_request, acked, an_update

from taskcontrol import cli, observations
from taskcontrol.config import controller, load
from taskcontrol.observations import Dialect
from taskcontrol.windows import Never, window
from wire.errors import ConfigError, InvalidInput, Unreachable

HEAD = 'job = "web"\ncredential = "/c"\n'


def a_file(folder: Path, text: str) -> Path:
    path = folder / "controller.toml"
    path.write_text(HEAD + text)
    return path


def test_a_port_is_at_most_65535(tmp_path):
    good = load(a_file(tmp_path, 'listen = "0.0.0.0:65535"\n[stateless]\n'))
    assert good.listen_on() == ("0.0.0.0", 65_535)
    with pytest.raises(ConfigError, match=r"cannot listen on '0\.0\.0\.0:65536'"):
        load(a_file(tmp_path, 'listen = "0.0.0.0:65536"\n[stateless]\n'))


@pytest.mark.parametrize("kinds", ["", "[stateless]\n[quorum]\nmembers = ['http://a']\n"])
def test_a_file_has_exactly_one_kind(kinds, tmp_path):
    with pytest.raises(ConfigError, match="needs exactly one"):
        load(a_file(tmp_path, kinds))


async def test_a_controller_answers_for_its_own_job_only(tmp_path):
    ask = controller(load(a_file(tmp_path, "[stateless]\nload = 0.0\n")))
    answer = await ask(a_request(8, an_update(0), job_handle="web"))
    assert len(acked(answer)) == 1
    with pytest.raises(InvalidInput, match="controller of web, not db"):
        await ask(a_request(8, an_update(0), job_handle="db"))


async def test_shards_are_read_from_their_map(tmp_path):
    held = tmp_path / "map.json"
    held.write_text(json.dumps({"users": [0, 1]}))
    ask = controller(load(a_file(tmp_path, f'[shards]\nmap = "{held}"\n')))
    answer = await ask(a_request(3, an_update(0), an_update(1), job_handle="web"))
    assert len(acked(answer)) == 1


async def test_nothing_is_acknowledged_while_the_map_cannot_be_read(tmp_path):
    ask = controller(load(a_file(tmp_path, f'[shards]\nmap = "{tmp_path}/none"\n')))
    assert acked(await ask(a_request(3, an_update(0), job_handle="web"))) == []


def test_a_bad_file_ends_the_check_with_an_error(tmp_path):
    done = CliRunner().invoke(cli.main, ["check", str(a_file(tmp_path, "[never]\n"))])
    assert done.exit_code != 0
    assert "error: " in done.output
    good = CliRunner().invoke(cli.main, ["check", str(a_file(tmp_path, "[stateless]\n"))])
    assert good.exit_code == 0
    assert "stateless controller of web" in good.output


async def test_an_address_where_nothing_listens_has_no_answer():
    with pytest.raises(Unreachable, match=r"cannot ask http://127\.0\.0\.1:1/"):
        await observations.read("http://127.0.0.1:1/")
    assert await observations.load("http://127.0.0.1:1/") == 1.0


async def test_an_answer_that_comes_in_parts_is_read_whole():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b'{"load', b'": 0', b".25}"):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert await observations.load(f"http://{host}:{port}/") == 0.25


@pytest.mark.parametrize(
    ("leaders", "expected"), [((), None), ((1,), 1), ((0, 1), None)], ids=["none", "one", "two"]
)
async def test_the_leader_is_the_only_member_that_reports_leadership(
    leaders, expected, monkeypatch
):
    async def read(url: str, *, post: bool = False) -> object:
        return {"leader": int(url[-1]) in leaders}

    monkeypatch.setattr(observations, "read", read)
    assert await observations.leader(["http://m0", "http://m1"], Dialect.PLAIN) == expected


def test_a_zone_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="no time zone 'Mars/Olympus'"):
        Never.of(["mon 09:00-10:00"], "Mars/Olympus")


def test_a_day_ends_at_24_hours():
    assert window("20:00-24:00").end == 24 * 60
    with pytest.raises(InvalidInput, match="hours are wrong"):
        window("20:00-24:30")
