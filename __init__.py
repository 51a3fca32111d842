"""Coatcheck: a distributed multi-GPU serving cluster for large language models.

A client of a running `coatcheck serve`, and the same engine in one process without a server:

    import coatcheck

    with coatcheck.Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)

    llm = coatcheck.LLM("meta-llama/Llama-3.2-1B")
    print(llm.generate(["Two and two are"], max_tokens=8)[0].text)

Each name of this module is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from coatcheck.cluster.client.async_client import AsyncClient, AsyncGenerationStream
    from coatcheck.cluster.client.client import Client, GenerationStream
    from coatcheck.cluster.client.llm import LLM
    from coatcheck.cluster.client.results import (
        GenerationChoice,
        GenerationChunk,
        GenerationResult,
        Logprob,
        TokenUsage,
    )
    from coatcheck.proto.errors import CoatcheckError
    from coatcheck.proto.grammar import Grammar
    from coatcheck.proto.sampling import SamplingParams

# `import coatcheck` alone imports neither torch nor gRPC.
_MODULES = {
    "AsyncClient": "cluster.client.async_client",
    "AsyncGenerationStream": "cluster.client.async_client",
    "Client": "cluster.client.client",
    "CoatcheckError": "proto.errors",
    "GenerationChoice": "cluster.client.results",
    "GenerationChunk": "cluster.client.results",
    "GenerationResult": "cluster.client.results",
    "GenerationStream": "cluster.client.client",
    "Grammar": "proto.grammar",
    "LLM": "cluster.client.llm",
    "Logprob": "cluster.client.results",
    "SamplingParams": "proto.sampling",
    "TokenUsage": "cluster.client.results",
}
__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "CoatcheckError",
    "GenerationChoice",
    "GenerationChunk",
    "GenerationResult",
    "GenerationStream",
    "Grammar",
    "Logprob",
    "SamplingParams",
    "TokenUsage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'coatcheck' has no attribute {name!r}")
    return getattr(import_module(f"coatcheck.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
