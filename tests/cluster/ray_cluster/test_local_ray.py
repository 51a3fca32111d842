"""The token of a local Ray is found by commands of the same user on the same host, and by nobody else."""

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coatcheck.cluster.ray_cluster import ray_address
from coatcheck.cluster.ray_cluster.local_ray import (
    delete_stale_tokens,
    find_local_rays,
    publish_token,
    ray_folder,
    read_token,
)
from coatcheck.cluster.ray_cluster.ray_address import find_ray
from coatcheck.cluster.ray_cluster.ray_environment import configure_local_ray, environment_token
from coatcheck.proto.errors import InvalidConfig, Unavailable

_ADDRESS = "127.0.0.1:4711"


def test_it_is_found_while_it_runs(tmp_path: Path) -> None:
    """While the context is open, the token is found by each spelling of the address, and the Ray is listed; afterwards
    neither."""
    with publish_token(tmp_path, _ADDRESS, "secret"):
        assert read_token(tmp_path, _ADDRESS) == read_token(tmp_path, "localhost:4711") == "secret"
        assert [address for _, address in find_local_rays(tmp_path)] == [_ADDRESS]
        assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]
    assert read_token(tmp_path, _ADDRESS) is None and find_local_rays(tmp_path) == [] and not list(tmp_path.iterdir())


def test_another_host_is_not_shown_it(tmp_path: Path) -> None:
    """No token is found for a cluster on another host whose head has the same port."""
    with publish_token(tmp_path, _ADDRESS, "secret"):
        assert read_token(tmp_path, "10.0.0.1:4711") is None


def test_what_others_could_have_put_there_is_not_believed(tmp_path: Path) -> None:
    """A link, or a file that other users may read, is not accepted as a token. A new token file replaces it and leaves
    the link's target alone."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    place = tmp_path / "coatcheck-4711.token"
    place.symlink_to(victim)
    assert read_token(tmp_path, _ADDRESS) is None and find_local_rays(tmp_path) == []
    with publish_token(tmp_path, _ADDRESS, "secret"):
        assert read_token(tmp_path, _ADDRESS) == "secret" and victim.read_text() == "mine"
        place.chmod(0o644)
        assert read_token(tmp_path, _ADDRESS) is None and find_local_rays(tmp_path) == []


def test_what_a_killed_command_has_left_goes(tmp_path: Path) -> None:
    """A token file is deleted if nothing listens at its port. Token files of a Ray that listens, and other files,
    stay."""
    (note := tmp_path / "coatcheck-notes.token").write_text("of something else")
    note.chmod(0o600)
    (strange := tmp_path / "coatcheck-4712.token").symlink_to(note)
    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_server(("127.0.0.1", 0)) as gone:
        ended = f"127.0.0.1:{gone.getsockname()[1]}"
        gone.close()
        with (
            publish_token(tmp_path, ended, "secret"),
            publish_token(tmp_path, address := f"127.0.0.1:{head.getsockname()[1]}", "secret"),
        ):
            delete_stale_tokens(tmp_path)
            assert read_token(tmp_path, ended) is None and read_token(tmp_path, address) == "secret"
    assert sorted(tmp_path.iterdir()) == sorted([note, strange])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's folder, which is empty. RAY_ADDRESS is not set."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (folder := tmp_path / "ray").mkdir()
    return folder


def test_of_several_that_run_one_must_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two local Rays listen, a command without an address contacts neither and names both. If one listens, it
    contacts that Ray. A Ray that was ended by kill -9 does not count."""
    monkeypatch.setattr(ray_address, "_CONNECT_SECONDS", 0.5)  # the servers of this test never answer
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
        publish_token(folder, "127.0.0.1:1", "secret"),
        publish_token(folder, first := f"127.0.0.1:{one.getsockname()[1]}", "secret"),
    ):
        with publish_token(folder, second := f"127.0.0.1:{other.getsockname()[1]}", "secret"):
            with pytest.raises(InvalidConfig, match="^2 Ray clusters run on this host: .*choose one with") as refused:
                find_ray("auto", own=True)
            assert first in str(refused.value) and second in str(refused.value)
        with pytest.raises(Unavailable, match=f"^no Ray cluster answers at {first}, the last one started on this host"):
            find_ray("auto", own=True)


def test_of_a_ray_that_has_ended_only_its_file_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ray_current_cluster names a Ray that has ended, `serve --ray-address auto` lists the Rays that run on this
    host, and which of them belong to a `coatcheck serve`. `scale` and `restart` use the one that runs."""
    monkeypatch.setattr(ray_address, "_CONNECT_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
        publish_token(folder, first := f"127.0.0.1:{one.getsockname()[1]}", "secret"),
        like_a_raylet(first),
        like_a_raylet(second := f"127.0.0.1:{other.getsockname()[1]}"),
        like_a_raylet("127.0.0.1:1"),
    ):
        with pytest.raises(
            InvalidConfig, match=r"names no Ray cluster .*; \d+ Ray clusters run on this host: "
        ) as refused:
            find_ray("auto")
        assert f"{first} (of a `coatcheck serve`)" in str(refused.value) and second in str(refused.value)
        (folder / "ray_current_cluster").write_text("127.0.0.1:1")
        with pytest.raises(
            Unavailable, match=r"answers at 127.0.0.1:1, .*; \d+ Ray clusters run on this host: "
        ) as gone:
            find_ray("auto")
        listed = str(gone.value).partition("run on this host: ")[2]
        assert f"{first} (of a `coatcheck serve`)" in listed and second in listed and "127.0.0.1:1," not in listed
        with pytest.raises(Unavailable, match=f"^no Ray cluster answers at {first}, .*does not speak gRPC"):
            find_ray("auto", own=True)


@contextmanager
def like_a_raylet(head: str) -> Iterator[None]:
    """A process whose command line names a Ray head, as a raylet's does."""
    with subprocess.Popen([sys.executable, "-c", "input()", f"--gcs-address={head}"], stdin=subprocess.PIPE) as process:
        yield
        process.kill()


def test_a_token_is_shown_at_its_own_port_alone(tmp_path: Path) -> None:
    """If another user renames the token file to the name of another port, the token is not sent to that port."""
    with publish_token(tmp_path, _ADDRESS, "secret"):
        (tmp_path / "coatcheck-4711.token").rename(tmp_path / "coatcheck-4712.token")
        assert read_token(tmp_path, "127.0.0.1:4712") is None and find_local_rays(tmp_path) == []


def test_a_fifo_in_rays_folder_holds_no_command_up(folder: Path) -> None:
    """A FIFO or a link in place of ray_current_cluster is not read, and no Ray is found."""
    note = folder / "ray_current_cluster"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(note)
        with pytest.raises(InvalidConfig, match="--ray-address auto (finds|names) no Ray cluster"):
            find_ray("auto", own=True)
        note.unlink()


@pytest.mark.parametrize(("mode", "has_token"), [(None, True), ("Token", True), ("disabled", False)])
def test_a_token_is_made_if_ray_will_ask_for_one(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, has_token: bool
) -> None:
    """RAY_AUTH_MODE is read without regard to case, as Ray does. Without the variable, Ray asks for a token."""
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": mode} if mode else {})
    configure_local_ray()
    assert ("RAY_AUTH_TOKEN" in os.environ) is has_token and bool(environment_token()) is has_token


def test_a_temporary_folder_that_is_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's folder is below TMPDIR unless its sockets' paths would be too long: then it is below /tmp. A RAY_TMPDIR
    that is too long is refused."""
    long = f"/var/{'x' * 40}"
    for given, folder in (("/var/tmp", "/var/tmp/ray"), (long, "/tmp/ray")):
        monkeypatch.setattr(os, "environ", {"TMPDIR": given})
        assert str(ray_folder()) == folder
        configure_local_ray()
        assert str(ray_folder()) == folder and os.environ.get("RAY_TMPDIR") == (None if given != long else "/tmp")
    monkeypatch.setattr(os, "environ", {"RAY_TMPDIR": long})
    with pytest.raises(InvalidConfig, match="too long for the paths of Ray's sockets; set it to a shorter folder"):
        configure_local_ray()


def test_a_user_without_a_home_has_no_token_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users without HOME and without an entry in /etc/passwd."""

    def fail(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "token"})
    assert environment_token() == ""
