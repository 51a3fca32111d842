"""The values of settings that `coatcheck serve` shares with a router. `coatcheck plan` reads them without gRPC."""

from typing import Final, Literal

# Rules that choose a group; see router/routing/routing_policy.py.
Routing = Literal["prefix-aware", "least-loaded", "round-robin"]

# How a model writes tool calls; router/parsing/output_format.py has a format of each name.
ToolParserName = Literal[
    "auto", "hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v32", "kimi_k2", "minimax",
    "minimax_m2", "qwen3_coder", "glm45", "gemma4", "openai",
]  # fmt: skip

# What root_path may be, as a regular expression. With a prefix such as /v1, /v1/models would be taken for /models.
ROOT_PATH: Final = r"(?!/(v1|v2|dashboard|v1/(chat|messages|models|responses))$)(/[\w.~-]+)+"
ROOT_PATH_HINT: Final = "a path such as /llm, without a slash at its end, and none with which the API's own paths begin"
