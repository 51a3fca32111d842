"""The record of verified models."""

import os
import pwd
from pathlib import Path

import pytest

from coatcheck.workers.verification.verified_models import one_at_a_time, record_of, write_record


def test_a_record_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is in the cache folder, and stands for every config.json with the same settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = record_of({"hidden_size": 8, "dtype": "float32"})
    assert record.is_relative_to(tmp_path) and not record.exists()
    with one_at_a_time(record):
        write_record(record, {"model_type": "new"})
    assert record_of({"hidden_size": 8}).exists() and not record_of({"hidden_size": 9}).exists()


def test_a_user_without_a_home_has_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users without HOME and without an entry in /etc/passwd. Nothing is written, nor found."""

    def fail(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    record = record_of({"hidden_size": 8})
    with one_at_a_time(record):
        write_record(record, {})
    assert not record.exists() and not os.listdir(tmp_path)
