"""ServeConfig: what an operator may say to `coatcheck serve`, by flags or by a YAML file of the same names.

Frozen, checked here, unknown names refused. Flags override the file. It knows neither Ray nor torch, so that a wrong
word is answered at once.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from coatcheck.cluster.config.exposure import check_exposure
from coatcheck.cluster.config.setting_values import (
    parse_dtype,
    parse_http_port,
    parse_kv_dtype,
    parse_memory,
    parse_otlp_endpoint,
)
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.log_lines import LogFormat

DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8000
# Of the memory that a rank finds free, what its KV pool takes; the rest is for activations, and on a CPU for everybody
# else.
FREE_SHARE = {"cpu": 0.1, "cuda": 0.85}


class ServeConfig(BaseModel):
    """`groups` tensor-parallel groups of `tp` ranks each, behind one router."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1)
    served_model_name: str | None = Field(None, min_length=1, max_length=256, pattern=r"\S")
    groups: int = Field(1, ge=1, le=4096)
    tp: int = Field(1, ge=1, le=1024)
    ray_address: str | None = Field(None, min_length=1)
    # Seconds that Ray may take to start, or to answer at `ray_address`.
    ray_start_timeout: float = Field(120.0, gt=0, le=3600, allow_inf_nan=False)
    grpc_host: str = Field("127.0.0.1", min_length=1)
    grpc_port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    http_host: str = Field("127.0.0.1", min_length=1)
    # Unset: the usual port, or any free one where gRPC takes any.
    http_port: Annotated[int | Literal["none"] | None, BeforeValidator(parse_http_port)] = None
    # A Ray resource: the router runs only where a node offers it.
    router_resource: str | None = Field(None, min_length=1)
    router_per_node: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(parse_dtype)] = "auto"
    kv_dtype: Annotated[Literal["auto", "bf16", "fp16", "fp8", "int8", "int4"], BeforeValidator(parse_kv_dtype)] = (
        "auto"
    )
    eviction: Literal["cost", "lru"] = "cost"
    block_size: Literal[8, 16, 32, 64, 128] = 16
    # Unset: FREE_SHARE of the device.
    kv_memory: Annotated[float | None, BeforeValidator(parse_memory), Field(gt=0, lt=2**60)] = None
    host_kv_memory: Annotated[float, BeforeValidator(parse_memory), Field(ge=0, lt=2**60)] = 0.0
    max_num_seqs: int = Field(256, ge=1, le=2**16)
    # With the router, while no group has room.
    max_queued: int = Field(1024, ge=0, le=2**20)
    # Unset: as many groups as --groups or `coatcheck scale` says, whatever the load.
    max_groups: int | None = Field(None, ge=1, le=4096)
    # What requests may wait, in seconds, before another group is wanted.
    queue_target: float = Field(2.0, gt=0, le=3600, allow_inf_nan=False)
    # How long nobody has waited and some group was idle, in seconds, before one fewer is wanted: its cache goes, too.
    scale_in_after: float = Field(600.0, gt=0, le=86400, allow_inf_nan=False)
    max_batch_tokens: int | None = Field(None, ge=1, le=2**20)
    max_model_len: int | None = Field(None, ge=2, lt=2**31)
    deterministic: bool = False
    # Sampling of fields that requests leave unset. "auto": from the model's generation_config.json; "none": our own
    # defaults. The file's eos_token_id is used either way.
    generation_config: Literal["auto", "none"] = "auto"
    log_format: LogFormat = "text"
    # A collector's gRPC address (OTLP); unset: no traces.
    otlp_endpoint: Annotated[str | None, BeforeValidator(parse_otlp_endpoint)] = None
    # Files on the router's host: its certificate and key, the authority of clients', the tenants and their keys.
    tls_cert: str | None = Field(None, min_length=1)
    tls_key: str | None = Field(None, min_length=1)
    tls_client_ca: str | None = Field(None, min_length=1)
    api_keys: str | None = Field(None, min_length=1)
    # Listens beyond loopback for everybody.
    insecure: bool = False

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """To Python true is 1; to whoever wrote it, it is not."""
        switches = {name for name, field in cls.model_fields.items() if field.annotation is bool}
        for name, value in settings.items():
            if isinstance(value, bool) and name in cls.model_fields.keys() - switches:
                raise ValueError(f"{name.replace('_', '-')} is {value}; it is no switch: give it a value")
        return settings

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.max_groups is not None and self.max_groups < self.groups:
            raise ValueError(f"max-groups is {self.max_groups}, and groups {self.groups}; it must be at least that")
        return self

    @classmethod
    def build(cls, flags: dict[str, Any], file: Path | None = None) -> Self:
        """Flags (None: not given) over the file's settings; raises InvalidConfig that names the setting."""
        settings = read_settings(file.expanduser()) if file else {}
        given = {name for name, value in flags.items() if value is not None}
        settings |= {name: flags[name] for name in given}
        for name in settings:
            if name not in cls.model_fields:
                raise InvalidConfig(f"{file}: unknown setting {name!r}; {_suggest(name, list(cls.model_fields))}")
        try:
            config = cls(**settings)
        except ValidationError as error:
            said = [
                explain(item) if file is None or _setting(item) in given else f"{file}: {explain(item)}"
                for item in error.errors()
            ]
            raise InvalidConfig("; ".join(said)) from None
        check_exposure(config)
        return config

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings that were given. Later settings then have their defaults; see contract.py."""
        return type(self).model_validate, (self.model_dump(exclude_unset=True),)

    @property
    def http_listen_port(self) -> int | None:
        """0: any free port; None: no HTTP."""
        if self.http_port == "none":
            return None
        if self.http_port is None:
            return DEFAULT_HTTP_PORT if self.grpc_port else 0
        return self.http_port

    @property
    def model_name(self) -> str:
        """The name that requests give: as configured, else the directory's name or the hub id."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model

    @property
    def model_source(self) -> str:
        """Where other processes, in other working directories, find the model: an absolute path or the hub id."""
        path = Path(self.model).expanduser()
        return str(path.resolve()) if path.is_dir() else self.model

    @property
    def group_names(self) -> list[str]:
        """The groups, by name."""
        return group_names(self.groups)

    def check_model_directory(self) -> None:
        """Raises InvalidConfig for what plainly is no checkpoint, long before a rank would find out."""
        path = Path(self.model).expanduser()
        # A hub id is OWNER/NAME; where OWNER is a directory here, a file's name is mistyped.
        owner = Path(path.parts[0]) if len(path.parts) > 1 else None
        looks_local = path.is_absolute() or self.model.startswith(("~", ".")) or self.model.count("/") > 1
        looks_local = looks_local or (owner is not None and owner.is_dir())
        if not path.exists():
            if looks_local:
                raise InvalidConfig(f"model directory {self.model} does not exist; give a directory or a hub id")
            return
        if not path.is_dir():
            raise InvalidConfig(f"model {self.model} is a file; give the directory that holds config.json")
        if not (path / "config.json").is_file():
            raise InvalidConfig(f"model directory {self.model} has no config.json; is it a transformers checkpoint?")


def group_names(groups: int) -> list[str]:
    """Of so many."""
    return [f"group-{index}" for index in range(groups)]


def read_settings(file: Path) -> dict[str, Any]:
    """A YAML file's settings, dashes in names as underscores; raises InvalidConfig."""
    import yaml  # here: only a run with --config pays for it

    try:
        loaded = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidConfig(f"{file}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:  # the latter also of numbers with thousands of digits
        raise InvalidConfig(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidConfig(f"{file} must hold settings, one `name: value` a line")
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def explain(item: Any) -> str:
    """One of pydantic's errors, in the words of the flags."""
    if not item["loc"]:
        return str(item["msg"]).removeprefix("Value error, ")
    name = _setting(item).replace("_", "-")
    message = item["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if item["type"] == "missing":
        return f"{name} is missing; give it as an argument or in the file"
    return f"{name} is {item['input']!r}; {message}"


def _setting(item: Any) -> str:
    return str(item["loc"][0]) if item["loc"] else ""
