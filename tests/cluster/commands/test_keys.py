"""`coatcheck keys`: a key is printed once, and the key file has only its hash."""

import os
from pathlib import Path

from coatcheck.cluster.commands.keys import keys
from coatcheck.router.access.key_file import hash_key, read_keys
from tests.cluster.command_line import run_here


def test_a_tenant_may_have_several_keys(tmp_path: Path) -> None:
    """stdout has the key alone, so that a script can read it. The file keeps its other entries."""
    file = tmp_path / "keys.yaml"
    old = hash_key("cc-old")
    file.write_text(f"tenants:\n- name: search\n  keys: ['{old}']\n  max_streams: 3\n")
    first, second = (run_here("keys", "new", "search", "--file", str(file)).out.strip() for _ in range(2))
    admin = run_here("keys", "new", "ops", "--role", "admin", "--file", str(file)).out.strip()
    tenants = read_keys(str(file)).by_key_hash
    assert {tenants[one].name for one in (old, hash_key(first), hash_key(second))} == {"search"}
    assert (tenants[old].max_streams, tenants[hash_key(admin)].role) == (3, "admin")
    assert not any(key in file.read_text() for key in (first, second, admin))


def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """An unknown role, another role than the tenant has, and a damaged file are refused, and the file is not
    changed."""
    file = tmp_path / "keys.yaml"
    run_here("keys", "new", "search", "--file", str(file))
    before = file.read_text()
    for words, said in ((["x", "--role", "root"], "role is 'root'"), (["search", "--role", "admin"], "the role user")):
        done = run_here("keys", "new", *words, "--file", str(file))
        assert done.code == 2 and said in done.err and not done.out
    assert file.read_text() == before
    file.write_text("tenants: [")
    done = run_here("keys", "new", "search", "--file", str(file))
    assert done.code == 2 and "is not YAML" in done.err and file.read_text() == "tenants: ["


def test_a_link_in_an_open_folder_harms_no_file(tmp_path: Path) -> None:
    """A link that another user has put beside the key file is not followed."""
    (victim := tmp_path / "victim").write_text("precious")
    (tmp_path / f".keys.yaml.{os.getpid()}").symlink_to(victim)
    keys("new", "search", tmp_path / "keys.yaml", None)
    assert victim.read_text() == "precious"
    assert [tenant.name for tenant in read_keys(str(tmp_path / "keys.yaml")).by_key_hash.values()] == ["search"]


def test_the_file_keeps_its_mode(tmp_path: Path) -> None:
    """A file that its owner has closed to other users stays closed when a key is added."""
    file = tmp_path / "keys.yaml"
    keys("new", "search", file, None)
    file.chmod(0o640)
    keys("new", "search", file, None)
    assert file.stat().st_mode & 0o777 == 0o640
