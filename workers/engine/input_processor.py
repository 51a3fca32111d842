"""InputProcessor: requests are checked, and become sequences with their blocks named.

It knows what the model and the pool can hold, and no sequence that runs.
"""

import math
from collections.abc import Callable

from coatcheck.proto.block_hash import block_key, hash_block, hash_chain
from coatcheck.proto.errors import ContextLengthExceeded, InvalidRequest
from coatcheck.workers.core.cache_reasons import content_chain
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.kv.prefix_registry import PrefixRegistry
from coatcheck.workers.structured.grammar_backend import GrammarBackend

_MOST_KEYS = 1024


class InputProcessor:
    """`max_model_len`: the most tokens of a sequence that model and pool can hold."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        block_size: int,
        max_model_len: int,
        grammars: GrammarBackend,
        book: PrefixRegistry,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.max_model_len = max_model_len
        self._grammars = grammars
        self._book = book
        self._clock = clock
        self._keys: dict[str, bytes] = {}
        self._arrivals = 0

    def take(self, request: EngineRequest, grammar: int | None) -> list[Sequence]:
        """The request's sequences, one for each choice; the prefix book records what they want. Raises InvalidRequest
        without any change. `grammar`: the number of the request's compiled grammar, or None."""
        self._check(request)
        if grammar is not None:
            self.check_grammar(request, grammar)
        chain = hash_chain(self._key(request.cache_salt), request.prompt_token_ids, self.block_size)
        self._book.advance_clock(self._clock())
        contents = content_chain(request.prompt_token_ids, self.block_size)
        self._book.record_request(chain, request.owner, request.retention, contents)
        return self._sequences(request, chain)

    def _check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest, and ContextLengthExceeded for more than max_model_len tokens."""
        vocab, prompt_len = self.spec.vocab_size, len(request.prompt_token_ids)
        if not prompt_len:
            raise InvalidRequest("the prompt is empty; give at least one token")
        for token in (*request.prompt_token_ids, *(token for ids in request.resume.values() for token in ids)):
            if not 0 <= token < vocab:
                raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocab}")
        request.sampling.check_model(vocab)
        wanted = prompt_len + (request.sampling.max_tokens or 1)
        if wanted > self.max_model_len:
            raise ContextLengthExceeded.of(
                self.max_model_len,
                f"you requested {wanted} tokens: {prompt_len} in the prompt, and max_tokens is "
                f"{request.sampling.max_tokens or 1}; shorten the prompt or lower max_tokens",
            )
        if any(not 0 <= choice < request.sampling.n for choice in request.resume):
            raise InvalidRequest(f"resume names a choice outside n = {request.sampling.n}")
        if request.sampling.structured is not None:
            self._grammars.require_tokenizer()

    def check_grammar(self, request: EngineRequest, grammar: int) -> None:
        """Raises InvalidRequest where its structured output, compiled by now, cannot be, or not behind what it
        resumes."""
        for said in request.resume.values() or ((),):
            self._grammars.check_resume(grammar, said)

    def _sequences(self, request: EngineRequest, chain: list[bytes]) -> list[Sequence]:
        """One for each choice; all but the first wait for the first's prompt. `chain` is the request's."""
        choices: list[Sequence] = []
        for choice in range(request.sampling.n):
            choices.append(self._sequence(request, choice, choices[0] if choices else None, chain))
        return choices

    def name_blocks(self, sequence: Sequence) -> None:
        """Names those that its computed tokens have filled since."""
        size = self.block_size
        while (start := len(sequence.block_hashes) * size) + size <= sequence.num_computed:
            parent = sequence.block_hashes[-1] if sequence.block_hashes else b""
            key = self._key(sequence.request.cache_salt)
            sequence.block_hashes.append(hash_block(key, parent, sequence.token_ids[start : start + size]))

    def _sequence(self, request: EngineRequest, choice: int, leader: Sequence | None, chain: list[bytes]) -> Sequence:
        prompt = request.prompt_token_ids
        max_tokens = request.sampling.max_tokens
        ends = set(request.sampling.stop_token_ids)
        ends |= set() if request.sampling.ignore_eos else set(self.spec.eos_token_ids)
        self._arrivals += 1
        now = self._clock()
        sequence = Sequence(
            request=request,
            choice=choice,
            token_ids=[*prompt, *request.resume.get(choice, ())],
            max_len=self.max_model_len if max_tokens is None else len(prompt) + max_tokens,
            arrival=(request.priority, self._arrivals),
            end_token_ids=frozenset(ends),
            leader=leader,
            submitted_at=now,
            deadline=math.inf if request.seconds_left is None else now + request.seconds_left,
        )
        key, hashed = self._key(request.cache_salt), len(chain) * self.block_size
        resumed = hash_chain(key, sequence.token_ids[hashed:], self.block_size, chain[-1] if chain else b"")
        sequence.block_hashes = [*chain, *resumed]
        return sequence

    def _key(self, salt: str) -> bytes:
        if salt not in self._keys:
            if len(self._keys) > _MOST_KEYS:
                self._keys.clear()  # a cache of a pure function: tenants come and go
            self._keys[salt] = block_key(salt=salt, model=self.spec.name, fingerprint=self.spec.fingerprint)
        return self._keys[salt]
