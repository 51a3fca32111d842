"""RequestGenerator: the requests of a load generator and their times. The same settings and seed give the same bytes.

Prompts are token ids, so that lengths are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coatcheck.cluster.benchmark.request_trace import BLOCK_TOKENS, TraceEntry
from coatcheck.proto.stubs import coatcheck_pb2 as pb

Prompts = Literal["random", "fixed", "shared-prefix"]
# Seeds of independent random streams.
_PREFIX, _SUFFIX, _BLOCK, _ARRIVAL = range(4)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """`message`: a serialized GenerateRequest, due `at` seconds after the start. `output_len`: tokens to expect."""

    at: float
    message: bytes
    output_len: int


@dataclass(frozen=True, slots=True)
class RequestGenerator:
    """The settings of all requests. A shared prefix of `prefix_len` tokens precedes `input_len` tokens.

    `text`: every prompt is this text. Generators with different `cache_salt` share no cached blocks.
    """

    vocab_size: int
    seed: int = 0
    prompts: Prompts = "random"
    input_len: int = 512
    output_len: int = 64
    num_prefixes: int = 1
    prefix_len: int = 0
    text: str | None = None
    temperature: float = 0.0
    model: str = ""
    cache_salt: str = ""

    def build_requests(self, count: int, *, rate: float | None = None, first: int = 0) -> list[BenchRequest]:
        """`count` requests from number `first` on: all due at once, or as a Poisson stream of `rate` per second."""
        if rate is None:
            arrivals = np.zeros(count)
        else:
            # The first request is due at 0; the gaps after it are exponential.
            arrivals = np.cumsum(self._generator(_ARRIVAL, first).exponential(1 / rate, count))
            arrivals -= arrivals[:1]
        return [self._request(float(at), self._prompt(first + i), self.output_len) for i, at in enumerate(arrivals)]

    def replay(
        self, trace: Sequence[TraceEntry], *, time_scale: float = 1.0, length_scale: float = 1.0
    ) -> list[BenchRequest]:
        """The requests of a trace, with scaled times and lengths. Equal block ids give equal tokens."""
        stride = max(1, round(BLOCK_TOKENS * length_scale))
        blocks: dict[int, NDArray[np.uint32]] = {}
        requests = []
        for index, entry in enumerate(trace):
            length = max(1, round(entry.input_len * length_scale))
            for block in entry.blocks:
                if block not in blocks:
                    blocks[block] = self._tokens(stride, _BLOCK, block)
            shared = [blocks[block] for block in entry.blocks]
            missing = max(0, length - stride * len(shared))
            tokens = np.concatenate([*shared, self._tokens(missing, _SUFFIX, index)])[:length]
            requests.append(
                self._request(entry.at * time_scale, tokens, max(1, round(entry.output_len * length_scale)))
            )
        return requests

    def _prompt(self, index: int) -> NDArray[np.uint32] | str:
        if self.text is not None:
            return self.text
        if self.prompts == "fixed":
            return self._tokens(self.input_len, _SUFFIX, 0)
        unique = self._tokens(self.input_len, _SUFFIX, index)
        if self.prompts == "random":
            return unique
        return np.concatenate([self._tokens(self.prefix_len, _PREFIX, index % self.num_prefixes), unique])

    def _request(self, at: float, prompt: NDArray[np.uint32] | str, output_len: int) -> BenchRequest:
        sampling = pb.SamplingParams(max_tokens=output_len, temperature=self.temperature, ignore_eos=True)
        if self.temperature > 0:
            sampling.seed = self.seed
        request = pb.GenerateRequest(model=self.model, sampling=sampling, cache_salt=self.cache_salt)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt.tolist())
        return BenchRequest(at, request.SerializeToString(), output_len)

    def _tokens(self, count: int, *stream: int) -> NDArray[np.uint32]:
        return self._generator(*stream).integers(0, self.vocab_size, count, dtype=np.uint32)

    def _generator(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])
