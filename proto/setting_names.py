"""The values of settings that `coatcheck serve` shares with a router. `coatcheck plan` reads them without gRPC."""

from typing import Final, Literal

# Rules that choose a group; see router/routing/routing_policy.py.
Routing = Literal["prefix-aware", "least-loaded", "round-robin"]

# How a model writes tool calls; router/parsing/output_format.py has a format of each name.
ToolParserName = Literal[
    "auto", "hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k3",
    "minimax", "minimax_m2", "minimax_m3", "qwen3_coder", "glm45", "step3", "solar_open", "solar_open2", "apertus",
    "gemma4", "openai",
]  # fmt: skip

# The regular expression that root_path must match. With the prefix /v1, the router would read /v1/models as /models.
ROOT_PATH: Final = r"(?!/(v1|v2|dashboard|v1/(chat|messages|models|responses))$)(/[\w.~-]+)+"
ROOT_PATH_HINT: Final = "a path such as /llm, without a slash at its end, with which no path of the API begins"
