"""read_json_object(): one of a model's JSON files, as workers, routers and the command line read them."""

import json
from pathlib import Path
from typing import Any

from coatcheck.proto.errors import InvalidModel


def read_json_object(file: Path) -> dict[str, Any] | None:
    """A file's JSON object; None where there is no such file. Raises InvalidModel for a file that cannot be read, or
    that holds something else."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidModel(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise InvalidModel(f"{file} is not valid JSON: {error}; fetch it again") from None
    if not isinstance(content, dict):
        raise InvalidModel(f"{file} does not hold a JSON object; fetch it again")
    return content
