"""Parsers of settings: each returns the parsed value, or raises ValueError with the accepted forms."""

import json
import math
import os
import re
from typing import Any

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.setting_names import ROOT_PATH, ROOT_PATH_HINT
from coatcheck.proto.tracing import check_endpoint
from coatcheck.workers.core.lora_module import LoraModule

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MEMORY = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]i?|)(?P<is_bytes>b?)\s*", re.IGNORECASE)
# Names that torch and other engines use -> our names.
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_KV_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8"}
_LORA_HINT = "write NAME=PATH, or several: sql=/adapters/sql chat=/adapters/chat"
_MEMORY_HINT = "write bytes (4GiB, 512MB, 4294967296) or a share of the free memory (0.5, 50%)"


def parse_dtype(value: object) -> object:
    """The name of a dtype for an alias such as "half". Any other value is returned unchanged."""
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def parse_kv_dtype(value: object) -> object:
    """The name of a KV pool's dtype for an alias such as "bfloat16". Any other value is returned unchanged."""
    return _KV_DTYPES.get(value, value) if isinstance(value, str) else value


def parse_memory(value: object) -> object:
    """Bytes from '4GiB', '512MB' or 4294967296; a share of the free memory from '0.5', 0.5 or '50%'. None stays None.

    A value up to 1 is a share, a larger value is bytes. A fraction above 1 is ambiguous and refused.
    """
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(_MEMORY_HINT)
    if isinstance(value, float) and value > 1 and not value.is_integer():
        raise ValueError(f"{value:g} is neither a share, which is at most 1, nor a number of bytes; {_MEMORY_HINT}")
    if not isinstance(value, str):
        return value
    if value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(_MEMORY_HINT) from None
        if not 0 < share <= 1:  # a value above 1 means bytes
            raise ValueError("a share of the free memory is above 0% and at most 100%")
        return share
    match = _MEMORY.fullmatch(value)
    if match is None:
        raise ValueError(_MEMORY_HINT)
    if not match["unit"] and not match["is_bytes"]:
        return parse_memory(float(match["number"]))
    size = float(match["number"]) * (_UNITS | _BINARY_UNITS)[match["unit"].lower()]
    if not math.isfinite(size):
        raise ValueError(f"this is more memory than any host has; {_MEMORY_HINT}")
    if 0 < size < 2:  # a value up to 1 means a share
        raise ValueError(f"this is less than two bytes; {_MEMORY_HINT}")
    return float(int(size))


def parse_http_port(value: object) -> object:
    """A port as int (0: any free port), or "none" for no HTTP."""
    if value in ("none", "off"):
        return "none"
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError("write a port from 0 (any free port) to 65535, or none for no HTTP")
    return value


def parse_root_path(value: object) -> object:
    """A prefix of paths, or None."""
    if isinstance(value, str) and re.fullmatch(ROOT_PATH, value) is None:
        raise ValueError(f"it must be {ROOT_PATH_HINT}")
    return value


def parse_otlp_endpoint(value: object) -> object:
    """A collector's URL, or None. See tracing.check_endpoint."""
    if isinstance(value, str):
        try:
            check_endpoint(value)
        except InvalidConfig as error:
            raise ValueError(str(error).partition("; ")[2]) from None
    return value


def parse_lora_modules(value: object) -> object:
    """The LoRA adapters as "NAME=PATH,NAME=PATH", from values of --lora-modules or a YAML list. None stays None.

    Each value is such a text, or the JSON object {"name": NAME, "path": PATH}; in YAML also a mapping with these keys.
    """
    values: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | dict) for one in values):
        return value
    pairs = [pair for one in values for pair in _split_value(one)]
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"it has {repeated!r} twice; give every adapter a name of its own")
    return ",".join(f"{name}={path}" for name, path in pairs) or None


def lora_modules_of(value: str | None) -> tuple[LoraModule, ...]:
    """The adapters in "NAME=PATH,NAME=PATH", with absolute paths for processes with other working directories."""
    # os.path leaves ~name as it is for an unknown user; Path.expanduser would raise.
    pairs = _split_text(value) if value else []
    return tuple(LoraModule(name, os.path.realpath(os.path.expanduser(path))) for name, path in pairs)


def _split_text(value: str) -> list[tuple[str, str]]:
    """(name, path) of each adapter in "NAME=PATH,NAME=PATH"."""
    pairs = [one.strip().partition("=") for one in value.split(",")]
    if any(not name.strip() or not path.strip() for name, _, path in pairs):
        raise ValueError(_LORA_HINT)
    return [(name.strip(), path.strip()) for name, _, path in pairs]


def _split_value(value: str | dict[str, Any]) -> list[tuple[str, str]]:
    """(name, path) of the adapters in one value of --lora-modules."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return _split_text(value)
    try:
        fields = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{value!r} is not JSON ({error}); {_LORA_HINT}") from None
    name, path = fields.get("name"), fields.get("path")
    # vLLM shows base_model_name as the adapter's parent in /v1/models; here the parent is always the served model.
    if fields.keys() - {"name", "path", "base_model_name"} or not (isinstance(name, str) and isinstance(path, str)):
        raise ValueError(f"an object has the strings name and path, and no other key; {_LORA_HINT}")
    if not name.strip() or not path.strip() or set(name) & set("=,") or "," in path:
        raise ValueError("name and path must not be empty; a name has neither = nor commas, and a path no commas")
    return [(name.strip(), path.strip())]
