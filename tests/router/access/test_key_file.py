"""The key file: what an operator may write into it, and how it may change while the router runs."""

import json
import logging
import os
from pathlib import Path

import pytest

from coatcheck.proto.errors import InvalidConfig, Unauthenticated
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.file_watcher import FileWatcher
from coatcheck.router.access.key_file import hash_key, read_keys
from tests.router.access.key_holders import OPS, SEARCH, write_keys


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A withdrawn key is refused within a second or so; a file that cannot be read leaves the former keys."""
    now = 0.0
    file = tmp_path / "keys.yaml"
    authenticator = Authenticator(write_keys(file), clock=lambda: now)
    assert authenticator.authenticate(f"Bearer {SEARCH}", "generate").name == "search"
    file.write_text(json.dumps({"tenants": [{"name": "ops", "keys": [hash_key(OPS)]}]}))
    assert authenticator.authenticate(f"Bearer {SEARCH}", "generate").name == "search"
    now = 1.0
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(f"Bearer {SEARCH}", "generate")
    file.write_text("tenants: [")
    now = 2.0
    with caplog.at_level(logging.ERROR):
        assert authenticator.authenticate(f"Bearer {OPS}", "generate").name == "ops"
    assert "its former keys stay valid" in caplog.text


def test_a_mounted_secret_changes_by_its_link(tmp_path: Path) -> None:
    """A change of a link's target counts as a change of the file, because mounted secrets change so."""
    now = 0.0
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 3)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    watched = FileWatcher([str(link)], lambda: now)
    now = 1.0
    assert not watched.has_changed()
    link.unlink()
    link.symlink_to(tmp_path / "b")
    now = 2.0
    assert watched.has_changed()
    now = 3.0
    assert not watched.has_changed()


_HASH = hash_key("cc-any")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("tenants: [", "is not YAML"),
        ("- a", "must hold one list, `tenants`"),
        ("tenants: []", "`tenants` is empty"),
        ("tenants: [x]", "an entry of `tenants` must hold settings"),
        (f"tenants: [{{keys: ['{_HASH}']}}]", "name is missing"),
        ("tenants: [{name: a}]", "keys must be a list of at least one sha256:HEX"),
        ("tenants: [{name: a, keys: [cc-plain-secret]}]", "keys must be a list"),
        ("tenants: [{name: a, certificates: [search]}]", "as clients' certificates have them: uri:NAME, email:NAME"),
        ("tenants: [{name: a, certificates: ['cn:']}]", "certificates must be a list of names"),
        ("tenants: [{name: a, certificates: cn:b}]", "certificates must be a list of names"),
        (f"tenants: [{{name: a, certificates: ['cn:b'], keys: ['{_HASH}', x]}}]", "keys must be a list"),
        (
            "tenants: [{name: a, certificates: ['dns:B']}, {name: b, certificates: ['dns:b']}]",
            "'b' has the certificate 'dns:b' of 'a'",
        ),
        (f"tenants: [{{name: a, keys: ['{_HASH}'], max_stream: 3}}]", "did you mean 'max_streams'"),
        (
            f"tenants: [{{name: a, keys: ['{_HASH}'], max_streams: true}}]",
            "max_streams is True; it must be a valid int",
        ),
        (f"tenants: [{{name: a, keys: ['{_HASH}'], weight: heavy}}]", "weight is 'heavy'; it must be a valid number"),
        (f"tenants: [{{name: 7, keys: ['{_HASH}']}}]", "name is 7; it must be a valid string"),
        (f"tenants: [{{name: a, keys: ['{_HASH}'], role: root}}]", "role is 'root'"),
        (f"tenants: [{{name: a, keys: ['{_HASH}']}}, {{name: b, keys: ['{_HASH}']}}]", "'b' has a key of 'a'"),
        (f"tenants: [{{name: a, keys: ['{_HASH}']}}, {{name: a, keys: ['{_HASH[:-1]}0']}}]", "'a' occurs twice"),
    ],
)
def test_a_wrong_key_file_is_refused(tmp_path: Path, written: str, said: str) -> None:
    """The error names the file and what to change, and never quotes text that may be a key."""
    file = tmp_path / "keys.yaml"
    file.write_text(written)
    with pytest.raises(InvalidConfig) as refused:
        read_keys(str(file))
    assert said in str(refused.value) and str(file) in str(refused.value)
    assert "plain-secret" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The error names a missing file, and the command that makes the file."""
    with pytest.raises(InvalidConfig, match=r"none\.yaml: No such file.*`coatcheck keys new NAME --file .*none\.yaml`"):
        Authenticator(os.fspath(tmp_path / "none.yaml"))
