"""Whose output goes through a pipe in front of the journal."""

from __future__ import annotations

from builders import a_spec

from agent.api import OciConfig, Relaxation, Stdout
from agent.images.core.standard_output import is_piped
from agent.runtime.core.records import key_of

OCI = OciConfig(command=["serve"])


def test_an_oci_image_with_a_shell_has_the_pipe_and_others_where_it_is_asked_for() -> None:
    """BUG-AG39"""
    assert is_piped(a_spec(), OCI, has_shell=True)
    assert not is_piped(a_spec(), OCI, has_shell=False)
    assert not is_piped(a_spec(), None, has_shell=True)
    assert is_piped(a_spec(stdout=Stdout.PIPE), None, has_shell=True)
    assert not is_piped(a_spec(stdout=Stdout.JOURNAL), OCI, has_shell=True)
    own_init = a_spec(relaxations=[Relaxation.OWN_INIT])
    assert not is_piped(own_init, OCI, has_shell=True)
    assert key_of(a_spec()) != key_of(a_spec(stdout=Stdout.PIPE))
