"""ModelConfig: a model's config.json, found and read, and what it says under the names that model families use.

A directory, the file itself, or a hub id. It knows neither torch nor transformers, whose imports take seconds; so a
number that a family leaves to its class's defaults is missed here, and asked for.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.json_file import read_json_object

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # the hub's oldest have no owner


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`name` is what a person calls the model; `values` are those of its text part."""

    name: str
    values: dict[str, Any]
    is_multimodal: bool = False

    @classmethod
    def open(cls, model: str) -> Self:
        """Raises InvalidModel where there is no such file, or it is not what it should be."""
        path = Path(model).expanduser()
        if path.is_dir():
            path, name = path / "config.json", path.resolve().name
        elif path.is_file():
            name = path.resolve().parent.name if path.name == "config.json" else path.stem
        elif _HUB_ID.fullmatch(model):
            path, name = _from_hub(model), model
        else:
            raise InvalidModel(f"there is no {model}; give a model's directory, its config.json, or a hub id")
        return cls.read(path, name)

    @classmethod
    def read(cls, file: Path, name: str) -> Self:
        """Raises InvalidModel as `open` does."""
        values = read_json_object(file)
        if values is None:
            raise InvalidModel(f"{file.parent} has no config.json; is it a transformers checkpoint?")
        text = values.get("text_config")
        return cls(name, {**values, **(text if isinstance(text, dict) else {})}, is_multimodal=text is not None)

    @property
    def model_type(self) -> str:
        """The family, such as llama."""
        return str(self.values.get("model_type", ""))

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there and not null; raises InvalidModel for anything but a count."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
                raise InvalidModel(f"{self.name}: config.json has {name} {value!r}; it should be a whole number")
            return value
        if default is not None:
            return default
        also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise InvalidModel(f"{self.name}: config.json has no {names[0]}{also}, which sizing needs; add it")

    def count(self, *names: str, default: int | None = None, most: int = 2**31) -> int:
        """As `number`, from 1 to `most`."""
        value = self.number(*names, default=default)
        if not 1 <= value <= most:
            name = next((name for name in names if self.values.get(name) is not None), names[0])
            raise InvalidModel(f"{self.name}: config.json has {name} {value}; it should be from 1 to {most:,}")
        return value


def _from_hub(hub_id: str) -> Path:
    """The file from the hub, or from its local cache where there is no network: nothing but config.json."""
    # Here: a local model does not pay for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # Not hf_hub_download, which tries for half a minute where there is no network.
        return Path(snapshot_download(hub_id, allow_patterns=["config.json"])) / "config.json"
    except GatedRepoError:
        reason = "its terms must be accepted there first, and HF_TOKEN be set"
    except RepositoryNotFoundError:
        reason = "it knows none, or shows it only to those who bring a token (HF_TOKEN)"
    except (OSError, ValueError) as error:  # its errors derive from these: offline, malformed id
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("Got: ").removesuffix(".")
    raise InvalidModel(
        f"no directory {hub_id}, and the hub gives no config.json for that id: {reason}; mend the name, or give a "
        "directory that holds the model"
    )
