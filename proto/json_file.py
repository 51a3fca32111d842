"""read_json_object: reads a model's JSON files for workers, routers and commands."""

import json
from pathlib import Path
from typing import Any

from coatcheck.proto.errors import InvalidModel


def read_json_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`; None if the file does not exist. Raise InvalidModel if it holds no JSON object."""
    try:
        # Only UTF-8 without a byte order mark, as transformers and tokenizers read these files.
        content = json.loads(file.read_bytes().decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidModel(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not text
        if "BOM" in str(error):
            raise InvalidModel(f"{file} begins with a byte order mark; save it as UTF-8 without one") from None
        raise InvalidModel(f"{file} is not valid JSON: {error}; fetch it again") from None
    if not isinstance(content, dict):
        raise InvalidModel(f"{file} does not hold a JSON object; fetch it again")
    return content
