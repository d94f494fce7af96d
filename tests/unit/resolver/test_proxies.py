"""The text that is written for proxies."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_dns import WEB

from control_plane.api.endpoints import Endpoints
from resolver import proxies
from wire.errors import InvalidInput

KNOWN = {"web": Endpoints(job="web", revision=3, endpoints=WEB), "gone": None}
SERVICES = [proxies.parse_service("web:http=:8080"), proxies.parse_service("gone:http")]

HAPROXY = """\
# Written by twine-resolver from the addresses of jobs. Changes by hand are overwritten.

frontend web-http
    bind *:8080
    default_backend web-http

backend web-http
    balance roundrobin
    server web-0 192.0.2.1:20000 check inter 1s fall 2 rise 1
    server web-1 192.0.2.1:20001 check inter 1s fall 2 rise 1
    server web-2 [2001:db8::1]:20002 check inter 1s fall 2 rise 1
    server web-3 m3.example:20003 check inter 1s fall 2 rise 1

backend gone-http
    balance roundrobin
"""

NGINX = """\
# Written by twine-resolver from the addresses of jobs. Changes by hand are overwritten.

upstream web-http {
    server 192.0.2.1:20000;  # web-0
    server 192.0.2.1:20001;  # web-1
    server [2001:db8::1]:20002;  # web-2
    server m3.example:20003;  # web-3
}

server {
    listen 8080;
    location / {
        proxy_pass http://web-http;
        proxy_set_header Host $http_host;
        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        proxy_next_upstream error timeout;
    }
}

upstream gone-http {
    server 127.0.0.1:9 down;  # no task is listed
}
"""


def test_haproxy():
    assert proxies.shipped_template("haproxy.cfg.j2")(SERVICES, KNOWN) == HAPROXY


def test_nginx():
    assert proxies.shipped_template("nginx.conf.j2")(SERVICES, KNOWN) == NGINX


def test_weights_are_written_if_they_differ() -> None:
    """A load-tested task gets more of the requests. The others have the usual weight."""
    known = KNOWN["web"]
    assert known is not None
    first, *others = known.endpoints
    weighted = {**KNOWN, "web": replace(known, endpoints=[replace(first, weight=200), *others])}
    text = proxies.shipped_template("haproxy.cfg.j2")(SERVICES, weighted)
    assert "check inter 1s fall 2 rise 1 weight 200" in text
    assert text.count("weight 100") == len(others)
    text = proxies.shipped_template("nginx.conf.j2")(SERVICES, weighted)
    assert f"server {first.host}:20000 weight=200;  # web-0" in text


@pytest.mark.behaviour("JC10")
def test_a_task_with_requests_disabled_is_in_the_file_without_requests() -> None:
    """A canary may get none of the requests, but nginx knows no weight of 0."""
    first, *others = WEB
    known = {"web": Endpoints(job="web", revision=3, endpoints=[replace(first, weight=0), *others])}
    text = proxies.shipped_template("haproxy.cfg.j2")(SERVICES[:1], known)
    assert "server web-0 192.0.2.1:20000 check inter 1s fall 2 rise 1 weight 0\n" in text
    text = proxies.shipped_template("nginx.conf.j2")(SERVICES[:1], known)
    assert "server 192.0.2.1:20000 down;  # web-0\n" in text
    assert text.count("weight=100") == len(others)


@pytest.mark.parametrize(
    "text",
    [
        *("web", "web:", ":http", "web:http=", "web:http=8080", "web:http=:0", "web:http=:65536"),
        *("Web:http", "web:http=:80;evil", "web:http=\n:80", "w" * 200 + ":http", "web:http=a b:8"),
    ],
)
def test_an_address_without_a_port_is_refused(text: str):
    with pytest.raises(InvalidInput):
        proxies.parse_service(text)


@pytest.mark.behaviour("BUG-UX84")
def test_a_service_that_is_named_twice_is_written_once() -> None:
    """Formerly `api:http api:http` made two backends of one name, which HAProxy refuses."""
    wanted = proxies.parse_services(["web:http=:8080", "gone:http", "web:http=:8080"])
    assert proxies.shipped_template("haproxy.cfg.j2")(wanted, KNOWN) == HAPROXY


@pytest.mark.behaviour("BUG-UX84")
@pytest.mark.behaviour("BUG-AG70")
def test_more_jobs_than_a_resolver_follows_are_refused_at_once() -> None:
    texts = [f"web{number}:{port}" for number in range(1000) for port in ("http", "admin")]
    assert len(proxies.parse_services(texts)) == 2000
    with pytest.raises(InvalidInput, match=r"1001 jobs are more than one resolver follows"):
        proxies.parse_services([*texts, "one-more:http"])
    with pytest.raises(InvalidInput, match="does not name a port of a job"):
        proxies.parse_services(["j" * 57 + ":http"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["web:http", "web:http=:80"], "web:http and web:http=:80 would both be called web-http"),
        (["a-b:c", "a:b-c"], "a-b:c and a:b-c would both be called a-b-c"),
        (["a:http=:80", "b:http=:80"], "a:http=:80 and b:http=:80 would listen at one address"),
    ],
)
def test_services_that_collide_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        proxies.parse_services(texts)


@pytest.mark.parametrize("host", ["h;\n} evil", "fd00::1%x\n} evil", "fe80::1%eth0"])
def test_an_invalid_host_is_never_written_to_a_file(host: str):
    """A machine reports its own address, so the address is checked before it is written.

    An IPv6 address may have a zone, which may be any text.
    """
    evil = WEB[0].__class__(task="web-0", machine="m0", host=host, ports={"http": 1}, version=1)
    known = {"web": Endpoints(job="web", revision=1, endpoints=[evil])}
    for name in proxies.FORMATS.values():
        with pytest.raises(InvalidInput, match="web-0"):
            proxies.shipped_template(name)(SERVICES[:1], known)


def test_a_template_of_the_operator_has_services_and_servers() -> None:
    text = (
        "{% for s in services %}{{ s.name }} {{ s.servers|map(attribute='at')|list }}{% endfor %}"
    )
    found = proxies.compile_template(text, "own.j2")([proxies.parse_service("web:http")], KNOWN)
    assert found.startswith("web-http ['192.0.2.1:20000', ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n{% if %}", r"own.j2 is not a template: .* \(line 2\)"),
        ("{{ nothing }}", "own.j2 cannot be rendered: 'nothing' is undefined"),
        ("{% include '/etc/passwd' %}", "cannot be rendered: no loader"),
    ],
)
def test_a_bad_template_is_an_error_and_writes_nothing(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        proxies.compile_template(text, "own.j2")(SERVICES, KNOWN)
