"""ModelConfig: the config.json of a model directory, a file or a model id, and its fields under any family's names.

This module imports neither torch nor transformers, which take seconds. A field that config.json omits counts as
missing until fill_defaults adds the default of transformers' config class.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.model_folder import describe_other_path, is_weights_file, no_type_error
from coatcheck.workers.checkpoint.model_alias import resolve_alias
from coatcheck.workers.checkpoint.quantisation_scheme import MODELOPT_FILE, read_model_config
from coatcheck.workers.checkpoint.text_tower import is_multimodal, text_config, text_fields, text_model_type
from coatcheck.workers.gguf.model_path import find_gguf, model_stem
from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES, fill_class_defaults

if TYPE_CHECKING:
    from coatcheck.workers.gguf.converter import Conversion

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # old Hugging Face model ids have no owner

# A config.json without one of these is incomplete: the default of its class is the size of another model.
_SIZES: Final = frozenset(
    {
        "d_model", "ffn_hidden_size", "hidden_size", "intermediate_size", "max_position_embeddings",
        "n_ctx", "n_embd", "n_head", "n_layer", "n_positions", "num_attention_heads", "num_heads", "num_hidden_layers",
        "num_layers", "vocab_size",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`name`: the model's name in messages. `values`: the fields; those of text_config override the others.

    `is_multimodal`: the checkpoint takes more than text; `is_served`: if so, whether its text model is served.
    """

    name: str
    values: dict[str, Any]
    is_multimodal: bool = False
    is_served: bool = True

    @classmethod
    def open(cls, model: str) -> Self:
        """Raise InvalidModel if there is no config.json, or if it holds no JSON object."""
        if (file := find_gguf(model)) is not None:
            return cls.of(model_stem(file), plan_conversion(file).config)
        path = find_config(model)
        if Path(model).expanduser().exists():
            name = path.resolve().parent.name if path.name == "config.json" else path.stem
        else:
            name = model
        return cls.read(path, name)

    @classmethod
    def read(cls, file: Path, name: str) -> Self:
        """Raise InvalidModel as `open` does."""
        values = read_model_config(file)
        if values is None:
            raise InvalidModel(describe_other_path(file.parent))
        return cls.of(name, values)

    @classmethod
    def of(cls, name: str, values: dict[str, Any]) -> Self:
        """`values`: the fields of a config.json."""
        if not is_multimodal(values):
            return cls(name, resolve_alias(values))
        text = text_config(values)
        merged = {**values, **(text if isinstance(text, dict) else {})}
        if text_model_type(values) is None:
            return cls(name, {**merged, "model_type": values.get("model_type")}, is_multimodal=True, is_served=False)
        return cls(name, text_fields(values, merged), is_multimodal=True)

    @property
    def model_type(self) -> str:
        """The family, such as llama; "" if config.json names none."""
        named = self.values.get("model_type")
        return named if isinstance(named, str) else ""

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is not null. Raise InvalidModel unless it is a whole number below 2**40."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, list) and len(set(map(repr, value))) == 1:  # Hunyuan's: one value for each layer
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
                raise InvalidModel(f"{self.name}: config.json has {name} {value!r}; it should be a whole number")
            return value
        if default is not None:
            return default
        also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        if not self.model_type:
            raise no_type_error(self.name, self.values)
        known = self.model_type in TESTED_MODEL_TYPES
        verify = "" if known else f"; `coatcheck verify` says whether model type {self.model_type} is served at all"
        raise InvalidModel(f"{self.name}: config.json has no {names[0]}{also}, which sizing needs; add it{verify}")

    def count(self, *names: str, default: int | None = None, most: int = 2**31) -> int:
        """Like `number`, but from 1 to `most`."""
        value = self.number(*names, default=default)
        if not 1 <= value <= most:
            name = next((name for name in names if self.values.get(name) is not None), names[0])
            raise InvalidModel(f"{self.name}: config.json has {name} {value}; it should be from 1 to {most:,}")
        return value


def fill_defaults(model: ModelConfig, *, with_sizes: bool = True) -> ModelConfig:
    """The config with its class's defaults for missing fields. `with_sizes`: also for the sizes that every published
    config.json has."""
    filled = fill_class_defaults(model.model_type, model.values)
    if not with_sizes:
        filled = {name: value for name, value in filled.items() if name not in _SIZES or name in model.values}
    return replace(model, values=filled)


def read_config(model: str) -> bytes:
    """The text of a model's config.json; of a GGUF file, the one that it is converted to. Raises InvalidModel."""
    if (file := find_gguf(model)) is not None:
        return json.dumps(plan_conversion(file).config).encode()
    return find_config(model).read_bytes()


def plan_conversion(file: Path, dtype: str = "auto") -> "Conversion":
    """What a GGUF file becomes, from its header. `dtype`: of weights that are dequantised. Raises InvalidModel."""
    # Imported late: other models need neither numpy nor the gguf package.
    from coatcheck.workers.gguf.converter import Conversion

    return Conversion.plan(file, dtype)


def find_config(model: str) -> Path:
    """The config.json of a model: a directory, a file or a model id, whose config.json is downloaded alone.

    Raises InvalidModel if there is none.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path / "config.json"
    if path.is_file():
        if is_weights_file(path):
            raise InvalidModel(describe_other_path(path))
        return path
    if _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise InvalidModel(f"there is no {model}; give a model's directory, its config.json, or a Hugging Face model id")


def _from_hub(hub_id: str) -> Path:
    """Download config.json alone, or find it in the local cache if there is no network."""
    # Imported late: a local model does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # Not hf_hub_download, which retries for half a minute without a network.
        return Path(snapshot_download(hub_id, allow_patterns=["config.json", MODELOPT_FILE])) / "config.json"
    except GatedRepoError:
        reason = "accept the model's terms on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "no such model, or a private one that needs HF_TOKEN"
    except (OSError, ValueError) as error:  # the base classes of the hub's errors: offline, malformed id
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("Got: ").removesuffix(".")
    raise InvalidModel(
        f"no directory {hub_id}, and the hub gives no config.json for that id: {reason}; correct the id, or give "
        "a directory that holds the model"
    )
