"""The committed stubs are those that the .proto files make."""

import os
import subprocess
import sys
from pathlib import Path

STUBS = Path(__file__).parents[2] / "proto" / "stubs"


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """Running generate.sh again gives byte for byte what is committed."""
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["sh", STUBS / "generate.sh", tmp_path], check=True, env=environment, capture_output=True)
    made = {file.name: file.read_bytes() for file in (tmp_path / "coatcheck" / "proto" / "stubs").iterdir()}
    committed = {file.name: file.read_bytes() for file in STUBS.glob("*_pb2*") if file.is_file()}
    assert made.keys() == committed.keys()
    assert [name for name in made if made[name] != committed[name]] == []
