"""EmbedService: embeddings of prompts. A generate request with max_tokens 1 computes each, and its token is dropped."""

import json
from pathlib import Path
from typing import Final

import numpy as np

from coatcheck.proto.errors import InvalidParameter
from coatcheck.proto.stubs.coatcheck_pb2 import (
    POOLING_LAST,
    POOLING_MEAN,
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    Pooling,
    SamplingParams,
)
from coatcheck.router.event_loop.message_limits import check_entries
from coatcheck.router.serving.generate_service import CallOptions, GenerateService

# Greedy, so that no part of the sampler runs but the argmax.
_SAMPLING: Final = SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)


class EmbedService:
    """One for each router."""

    def __init__(self, generation: GenerateService, directory: Path | None) -> None:
        """`directory`: the model's files; None if there are none."""
        self._generation = generation
        self._default = _read_pooling(directory) if directory is not None else POOLING_LAST
        # What sentence-transformers puts before a text, by the kind of the text, such as "query".
        self.instructions = _read_instructions(directory) if directory is not None else {}

    async def embed(self, message: EmbedRequest, options: CallOptions) -> EmbedResponse:
        """The embedding of a prompt. Raises InvalidParameter for more dimensions than the model has."""
        check_entries(message)
        if message.HasField("dimensions") and not message.dimensions:
            raise InvalidParameter("dimensions", "is 0; it must be at least 1")
        request = GenerateRequest(
            request_id=message.request_id,
            model=message.model,
            sampling=_SAMPLING,
            cache_salt=message.cache_salt,
            priority=message.priority,
            session_id=message.session_id,
            pooling=message.pooling or self._default,
        )
        match message.WhichOneof("prompt"):
            case "text":
                request.text = message.text
            case "token_ids":
                request.token_ids.CopyFrom(message.token_ids)
            case "chat":
                request.chat.CopyFrom(message.chat)
        response = await self._generation.generate(request, options)
        usage = response.final.usage
        return EmbedResponse(
            request_id=response.started.request_id,
            model=response.started.model,
            embedding=_finish(np.array(response.final.embedding, dtype=np.float32), message),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_device_tokens + usage.cached_host_tokens,
            group=response.final.group,
        )


def _finish(embedding: "np.ndarray[tuple[int], np.dtype[np.float32]]", message: EmbedRequest) -> list[float]:
    """The embedding, cut and normalized as the message asks."""
    if message.dimensions > len(embedding):
        raise InvalidParameter(
            "dimensions", f"is {message.dimensions}; the model's embeddings have {len(embedding)}: ask for at most that"
        )
    if message.dimensions:
        embedding = embedding[: message.dimensions]
    if not message.HasField("normalize") or message.normalize:
        embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
    values: list[float] = embedding.tolist()
    return values


def _read_pooling(directory: Path) -> Pooling:
    """The pooling that sentence-transformers' file in a checkpoint names; POOLING_LAST without the file."""
    try:
        config = json.loads((directory / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return POOLING_LAST
    is_mean = isinstance(config, dict) and config.get("pooling_mode_mean_tokens") is True
    return POOLING_MEAN if is_mean else POOLING_LAST


def _read_instructions(directory: Path) -> dict[str, str]:
    """The prompts that sentence-transformers' configuration in a checkpoint has; none without the file."""
    try:
        config = json.loads((directory / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    prompts = config.get("prompts") if isinstance(config, dict) else None
    if not isinstance(prompts, dict):
        return {}
    return {name: text for name, text in prompts.items() if isinstance(text, str)}
