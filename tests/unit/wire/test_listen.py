"""The sockets that servers listen on: their addresses, and the users who may open a unix socket."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from wire.errors import ConfigError
from wire.listen import tcp_socket, unix_socket


@pytest.mark.parametrize(("is_shared", "mode"), [(False, 0o600), (True, 0o660)])
def test_only_the_owner_and_the_group_of_a_shared_socket_may_open_it(
    is_shared: bool, mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with unix_socket(path, is_shared=is_shared):
        assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.behaviour("BUG-AG114")
@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_an_address_that_dns_cannot_hold_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*: this is not the name of a host"):
        tcp_socket(host, 0)


def test_a_socket_that_answers_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_socket(path):
        with pytest.raises(ConfigError, match="another process answers there"):
            unix_socket(path)
        assert path.is_socket()
    unix_socket(path).close()  # the socket of an ended server is replaced
