"""InputProcessor: checks requests, and makes their sequences with the hashes of their full blocks."""

import math
from collections.abc import Callable
from typing import Final

from coatcheck.proto.block_hash import block_key, hash_block, hash_chain
from coatcheck.proto.errors import ContextLengthExceeded, InvalidRequest
from coatcheck.workers.core.cache_reasons import content_chain
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.request import EngineRequest, Pooling
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.kv.prefix_registry import PrefixRegistry
from coatcheck.workers.structured.grammar_backend import GrammarBackend

_MAX_KEYS: Final = 1024  # cached block keys


class InputProcessor:
    """`max_model_len`: the most tokens of a sequence that the settings, the model and the KV pool allow.

    `has_prefix_cache`: whether a prompt may start at a cached block.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        block_size: int,
        max_model_len: int,
        has_prefix_cache: bool,
        grammars: GrammarBackend,
        prefixes: PrefixRegistry,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._has_prefix_cache = has_prefix_cache
        self._grammars = grammars
        self._prefixes = prefixes
        self._clock = clock
        self._keys: dict[tuple[str, str], bytes] = {}  # cached block keys, by cache salt and adapter
        self._fingerprints = {"": "", **{adapter.name: adapter.fingerprint for adapter in spec.adapters}}
        self._num_sequences = 0  # since the start

    def make_sequences(self, request: EngineRequest, grammar_id: int | None) -> list[Sequence]:
        """One sequence for each choice. The first computes the prompt for the others, and the prefix registry records
        the request. Without a prefix cache each choice computes the prompt.

        `grammar_id`: of the request's grammar; None if it has none, or if not every rank has compiled it.
        Raises InvalidRequest, or ContextLengthExceeded for more than max_model_len tokens, and then changes nothing.
        """
        self._check_request(request)
        if grammar_id is not None:
            self.check_grammar(request, grammar_id)
        if not self._has_prefix_cache:  # without hashes no block is looked up, registered or reported
            return [self._make_sequence(request, choice, None, []) for choice in range(request.sampling.n)]
        chain = hash_chain(self._block_key(request), request.prompt_token_ids, self._block_size)
        self._prefixes.advance_clock(self._clock())
        contents = content_chain(request.prompt_token_ids, self._block_size)
        self._prefixes.record_request(chain, request.owner, request.retention, contents)
        sequences: list[Sequence] = []
        for choice in range(request.sampling.n):
            sequences.append(self._make_sequence(request, choice, sequences[0] if sequences else None, chain))
        return sequences

    def check_grammar(self, request: EngineRequest, grammar_id: int) -> None:
        """Raise InvalidRequest if the request's compiled grammar cannot be used, or does not match the tokens that the
        request resumes with."""
        for token_ids in request.resume.values() or ((),):
            self._grammars.check_resume(grammar_id, token_ids)

    def hash_full_blocks(self, sequence: Sequence) -> None:
        """Hash the blocks that the sequence's computed tokens have filled since the last call. Without a prefix cache,
        no effect."""
        if not self._has_prefix_cache:
            return
        size = self._block_size
        while (start := len(sequence.block_hashes) * size) + size <= sequence.num_computed:
            parent = sequence.block_hashes[-1] if sequence.block_hashes else b""
            key = self._block_key(sequence.request)
            sequence.block_hashes.append(hash_block(key, parent, sequence.token_ids[start : start + size]))

    def _check_request(self, request: EngineRequest) -> None:
        vocab, prompt_len = self._spec.vocab_size, len(request.prompt_token_ids)
        if not prompt_len:
            raise InvalidRequest("the prompt is empty; give at least one token")
        for token in (*request.prompt_token_ids, *(token for ids in request.resume.values() for token in ids)):
            if not 0 <= token < vocab:
                raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocab}")
        request.sampling.check_model(vocab)
        if request.adapter not in self._fingerprints:
            raise InvalidRequest(f"this group has no LoRA adapter {request.adapter!r}; see --lora-modules")
        wanted = prompt_len + (request.sampling.max_tokens or 1)
        if request.pooling is not Pooling.NONE and request.sampling.max_tokens == 1:
            wanted = prompt_len  # the one output token of an embedding request is never computed, so it needs no block
        if wanted > self._max_model_len:
            raise ContextLengthExceeded.for_limit(
                self._max_model_len,
                f"the prompt has {prompt_len} and max_tokens is {request.sampling.max_tokens or 1}. Shorten the prompt "
                "or lower max_tokens",
            )
        if any(not 0 <= choice < request.sampling.n for choice in request.resume):
            raise InvalidRequest(f"resume names a choice outside n = {request.sampling.n}")
        if request.sampling.structured is not None:
            self._grammars.require_tokenizer()

    def _make_sequence(
        self, request: EngineRequest, choice: int, prompt_source: Sequence | None, chain: list[bytes]
    ) -> Sequence:
        prompt = request.prompt_token_ids
        max_tokens = request.sampling.max_tokens
        end_token_ids = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            end_token_ids.update(self._spec.eos_token_ids)
        self._num_sequences += 1
        now = self._clock()
        sequence = Sequence(
            request=request,
            choice=choice,
            token_ids=[*prompt, *request.resume.get(choice, ())],
            max_len=self._max_model_len if max_tokens is None else len(prompt) + max_tokens,
            sort_key=(request.priority, self._num_sequences),
            end_token_ids=frozenset(end_token_ids),
            prompt_source=prompt_source,
            adapter=self._spec.adapter_index(request.adapter),
            submitted_at=now,
            deadline=math.inf if request.seconds_left is None else now + request.seconds_left,
        )
        if not self._has_prefix_cache:
            return sequence
        # Resumed tokens may fill further blocks.
        key, hashed = self._block_key(request), len(chain) * self._block_size
        resumed = hash_chain(key, sequence.token_ids[hashed:], self._block_size, chain[-1] if chain else b"")
        sequence.block_hashes = [*chain, *resumed]
        return sequence

    def _block_key(self, request: EngineRequest) -> bytes:
        salt_and_adapter = request.cache_salt, request.adapter
        if salt_and_adapter not in self._keys:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            self._keys[salt_and_adapter] = block_key(
                salt=request.cache_salt,
                model=self._spec.name,
                fingerprint=self._spec.fingerprint,
                adapter=self._fingerprints[request.adapter],
            )
        return self._keys[salt_and_adapter]
