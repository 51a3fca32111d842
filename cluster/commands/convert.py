"""`coatcheck convert`: a GGUF file as a checkpoint directory in transformers' format."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from coatcheck.cluster.config.gguf_model import convert_with_progress
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.gguf.model_path import find_gguf

EPILOG = """\
Examples:

coatcheck convert Qwen3-8B-Q4_K_M.gguf /models/Qwen3-8B

coatcheck convert model-00001-of-00003.gguf /models/model --dtype float16
"""


def convert(
    model: Annotated[str, typer.Argument(help="A GGUF file, the first one of a split model, or a folder with one.")],
    out: Annotated[Path, typer.Argument(help="The directory to write. It must not exist, or be empty.")],
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of weights that are dequantised, such as the embedding. auto: the model's."),
    ] = "auto",
) -> None:
    """Convert the GGUF file MODEL to a checkpoint directory OUT that every command of Coatcheck takes.

    `coatcheck serve` converts a GGUF file by itself, into a cache of this host. Convert it with this command for ranks
    on several hosts, into a directory that all of them see. Weights of linears stay quantised.
    """
    path = find_gguf(model)
    if path is None:
        raise InvalidConfig(f"{model} is no GGUF file, and no folder with one; give a file whose name ends in .gguf")
    directory = out.expanduser().absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidConfig(f"{out} exists; give a directory that does not exist, or an empty one")
    convert_with_progress(path, directory, dtype)
    print(f"wrote {directory}")
