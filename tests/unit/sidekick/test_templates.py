"""Profiles that are jinja2 templates: rendered, with the lines of the template, and refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fake_host import FakeHost

from sidekick.expression import Fact
from sidekick.lint import lint_profiles
from sidekick.profile import Library
from sidekick.settings import SETTINGS
from sidekick.settings.sysctl import values_of
from wire.errors import ConfigError

FACTS: dict[str, Fact] = {"cpu.count": 4, "cpu.vendor": "intel", "nic.names": ["eth0", "eth1"]}
LOOP = """description = "d"
{# two
   lines #}
{% if cpu.vendor == "intel" %}
[sysctl]
"vm.swappiness" = {{ cpu.count * 2 }}
{% for name in nic.names %}
"net.ipv4.conf.{{ name }}.rp_filter" = 1
{% endfor %}
{% endif %}
"""


def library(folder: Path, **files: str) -> Library:
    for name, text in files.items():
        (folder / f"{name}.toml.j2").write_text(text)
    return Library([folder], SETTINGS)


def test_a_template_is_rendered_and_its_sources_are_lines_of_the_template(tmp_path: Path) -> None:
    found = library(tmp_path, web=LOOP).load("web", FACTS)
    assert {k: v.value for k, v in values_of(found).items()} == {
        "vm.swappiness": 8,
        "net.ipv4.conf.eth0.rp_filter": 1,
        "net.ipv4.conf.eth1.rp_filter": 1,
    }
    assert found.source_of("sysctl.vm.swappiness") == "web:6"
    assert found.source_of("sysctl.net.ipv4.conf.eth1.rp_filter") == "web:8"
    other = library(tmp_path).load("web", FACTS | {"cpu.vendor": "amd"})
    assert other.section("sysctl") is None


def test_the_record_keeps_the_template_so_that_it_is_rendered_again(tmp_path: Path) -> None:
    found = library(tmp_path, web=LOOP).load("web", FACTS)
    assert [(text.name, text.text) for text in found.texts] == [("web", LOOP)]


def test_a_template_extends_a_plain_profile_and_is_extended(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("description='b'\n[sysctl]\n'vm.swappiness'=60\n")
    (tmp_path / "leaf.toml").write_text("description='l'\nextends='web'\n")
    files = library(tmp_path, web=LOOP.replace('"d"', '"d"\nextends = "base"'))
    found = files.load("leaf", FACTS)
    assert found.lineage == ("leaf", "web", "base")
    assert found.source_of("sysctl.vm.swappiness") == "web:7"
    assert files.names() == ["base", "leaf", "web"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "description = 'd'\n\na = {{ cpu.cnt }}\n",
            r"an unknown fact: .*'cnt' \(line 3\)",
        ),
        ("{{ memory.mib }}", r"'memory' is undefined \(line 1\)"),
        ("description='d'\n{% if %}", r"is not a template: .* \(line 2\)"),
        ("\n{{ 1 / 0 }}", r"cannot be rendered: division by zero \(line 2\)"),
        ("\n{% include '/etc/passwd' %}", r"no loader .* \(line 2\)"),
        ("{{ ''.__class__ }}", "unsafe"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}", "65536"),
        ("{# c\n #}\ndescription = 'd'\n[sysctl\n", r"does not render to TOML: .*at line 4\b"),
        ("{% if 1 %}\n{# c #}\ndescription='d'\nx = 1\n{% endif %}", r"unknown.*\(web:4\)"),
    ],
)
def test_a_bad_template_is_one_error_with_its_line(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        library(tmp_path, web=text).load("web", FACTS)
    assert re.search(expected, f"{caught.value} {caught.value.errors}")


def test_two_files_of_one_name_are_refused_and_others_are_listed(tmp_path: Path) -> None:
    (tmp_path / "web.toml").write_text("description='w'\n")
    (tmp_path / "good.toml").write_text("description='g'\n")
    files = library(tmp_path, web=LOOP)
    with pytest.raises(ConfigError, match="exists twice"):
        files.load("web", FACTS)
    found = lint_profiles(files, files.names(), FACTS, FakeHost(tmp_path / "host").host())
    assert {f.profile for f in found if f.severity == "error"} == {"web"}


def test_lint_notes_that_a_template_was_checked_for_this_host_only(tmp_path: Path) -> None:
    files = library(tmp_path, web="description = 'd'\n")
    (finding,) = lint_profiles(files, ["web"], FACTS, FakeHost(tmp_path / "host").host())
    assert (finding.severity, "as rendered here" in finding.reason) == ("note", True)


def test_an_error_about_a_missing_jinja2_has_a_hint(tmp_path: Path, mocker) -> None:
    mocker.patch.dict(sys.modules, {"jinja2": None})
    with pytest.raises(ConfigError, match="jinja2 is not installed"):
        library(tmp_path, web=LOOP).load("web", FACTS)
