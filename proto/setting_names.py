"""The values of settings that `coatcheck serve` shares with a router. `coatcheck plan` reads them without gRPC."""

from typing import Literal

# Rules that choose a group; see router/routing/routing_policy.py.
Routing = Literal["prefix-aware", "least-loaded", "round-robin"]

# How a model writes tool calls; router/parsing/output_format.py has a format of each name.
ToolParserName = Literal[
    "auto", "hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3", "kimi_k2", "minimax", "minimax_m2",
    "qwen3_coder", "glm45", "openai",
]  # fmt: skip
