"""Request: a validated client request in token ids, as it is sent to a group."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coatcheck.proto.block_hash import block_key, hash_chain
from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import POOLING_UNSPECIFIED, GetModelResponse, Pooling, Resumed
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage
from coatcheck.proto.stubs.worker_pb2 import Submit
from coatcheck.proto.tracing import NO_TRACE_CONTEXT
from coatcheck.router.access.tenant import ANONYMOUS, Tenant

_SLICE: Final = 16384  # token ids


@dataclass(frozen=True, slots=True)
class Request:
    """`sampling` has its seed and max_tokens set; `resume[choice]` are output tokens that the client already has."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    resume: Mapping[int, Sequence[int]] = field(default_factory=dict)
    cache_salt: str = ""
    priority: int = 0
    session_id: str = ""
    retention: Retention | None = None
    tenant: Tenant = ANONYMOUS
    pooling: Pooling = POOLING_UNSPECIFIED
    deadline: float | None = None  # when the client gives up, in the event loop's time
    adapter: str = ""  # the name of the LoRA adapter; "" for none
    digest: bytes = b""  # of the client's message; see digest_request
    _block_hashes: dict[Hashable, list[bytes]] = field(default_factory=dict, repr=False)

    # Empty, or one serialised Submit with only the prompt's token ids.
    _packed_prompt: list[bytes] = field(default_factory=list, repr=False)

    def prepare_long_prompt(self, model: GetModelResponse) -> None:
        """Hashes and serialises a long prompt, so that `block_hashes` and `to_submit` are fast. Call it in a thread.

        One call for a million ids holds the GIL for 40 ms, so the ids are serialised in slices.
        """
        self.block_hashes(model)
        prompt = Submit()
        for start in range(0, len(self.prompt_token_ids), _SLICE):
            prompt.prompt_token_ids.extend(self.prompt_token_ids[start : start + _SLICE])
        self._packed_prompt[:] = [prompt.SerializeToString()]

    @property
    def max_len(self) -> int:
        """Max tokens of one choice, with the prompt. The only token of an embedding request needs no KV."""
        most = self.sampling.max_tokens or 1
        return len(self.prompt_token_ids) + (0 if self.pooling and most == 1 else most)

    def block_hashes(self, model: GetModelResponse) -> list[bytes]:
        """The hashes of the prompt's full blocks on a group with this model, computed once. The last token is left out:
        it is always computed, because its logits give the first output."""
        adapter = next((one.fingerprint for one in model.adapters if one.name == self.adapter), "")
        cache_key = (model.name, model.fingerprint, adapter, model.block_size)
        if cache_key not in self._block_hashes:
            key = block_key(salt=self.cache_salt, model=model.name, fingerprint=model.fingerprint, adapter=adapter)
            self._block_hashes[cache_key] = hash_chain(key, self.prompt_token_ids[:-1], model.block_size)
        return self._block_hashes[cache_key]

    def to_submit(
        self,
        id: int,
        attempt: int,
        delivered: Mapping[int, Sequence[int]],
        uncached_tokens: int | None = None,
        trace_context: Mapping[str, str] = NO_TRACE_CONTEXT,
        *,
        max_queued_tokens: int | None = None,
        now: float = 0.0,
    ) -> Submit:
        """The message to a group. `delivered`: output tokens by choice that the group must not send again.
        `max_queued_tokens`: with more prompt tokens queued, the group returns the request; None: never. Stop
        strings are not sent, because the router finds them in the text."""
        packed = self._packed_prompt
        submit = Submit.FromString(packed[0]) if packed else Submit(prompt_token_ids=self.prompt_token_ids)
        rest = Submit(
            id=id,
            attempt=attempt,
            request_id=self.request_id,
            prompt_token_ids=(),  # tells mypy that trace_context does not contain this field
            sampling=self._group_sampling(),
            resume=[Resumed(choice=choice, token_ids=ids) for choice, ids in delivered.items() if ids],
            cache_salt=self.cache_salt,
            uncached_tokens=uncached_tokens,
            max_queued_tokens=max_queued_tokens,
            priority=self.priority,
            tenant="" if self.tenant is ANONYMOUS else self.tenant.name,
            retention=self.retention.to_message() if self.retention else None,
            pooling=self.pooling,
            adapter=self.adapter,
            seconds_left=None if self.deadline is None else max(self.deadline - now, 0.0),
            **trace_context,
        )
        submit.MergeFrom(rest)
        return submit

    def _group_sampling(self) -> SamplingMessage:
        message = self.sampling.to_message()
        for name in ("stop", "skip_special_tokens", "include_stop", "bad_words", "max_reasoning_tokens"):
            message.ClearField(name)
        return message
