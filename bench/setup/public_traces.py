"""The published request traces that benchmarks replay: their file names and sources.

They must be downloaded by hand, because their licences do not allow this repository to contain them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from coatcheck.proto.errors import InvalidConfig

CONVERSATION = "mooncake_conversation.jsonl.gz"
SYNTHETIC = "mooncake_synthetic.jsonl.gz"
AZURE = "azure_conv_2023.csv.gz"
# Where on GitHub: the repository, and the file in it.
ORIGINS = {
    CONVERSATION: ("kvcache-ai/Mooncake", "FAST25-release/traces/conversation_trace.jsonl"),
    SYNTHETIC: ("kvcache-ai/Mooncake", "FAST25-release/traces/synthetic_trace.jsonl"),
    AZURE: ("Azure/AzurePublicDataset", "data/AzureLLMInferenceTrace_conv.csv"),
}
FOLDER = Path("bench/traces")  # git ignores it
Traces = Annotated[Path, typer.Option("--traces", help="The folder of the public traces.")]


def check_traces(folder: Path, names: Iterable[str]) -> None:
    """Raises InvalidConfig, which says where to get it, at the first of these traces that the folder lacks."""
    for name in names:
        if not (folder / name).is_file():
            repository, file = ORIGINS[name]
            raise InvalidConfig(
                f"{folder / name} is not there: gzip {file} of {repository} on GitHub into it, "
                "or name the folder that has it with --traces"
            )
