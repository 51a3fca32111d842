"""ResumeTickets: proofs that a router of this cluster has admitted a request, so that its resume need not be admitted.

`Started` brings the ticket of its request. A client that loses its router sends the ticket to another router, with the
request and the token ids that it has. Like a TLS session ticket (RFC 5077) it holds all that is needed to check it:
routers share a key, but no memory.

    ticket    8 bytes: when it expires, in seconds since 1970; 32 bytes: HMAC-SHA256 of this time and the request
    request   the tenant's name, the request's id and seed, and a digest of all other fields except `resume`

So a ticket is of use only for the same request of the same tenant, which gives the same tokens again. A router accepts
a ticket at most 16 times.
"""

import hashlib
import hmac
import json
import secrets
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

from google.protobuf.message import Message

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams
from coatcheck.router.access.tenant import Tenant

_LIFETIME_SECONDS: Final = 86_400  # longer than any stream
_TIME_BYTES: Final = 8
_MAX_RESUMES: Final = 16  # on one router; a stream is rarely lost more often, and each copy of it costs as much again
_SLICE: Final = 16384  # token ids
# The numbers of resumes are kept for this many tickets. Beyond it the ticket that was first used first is forgotten.
_MAX_TICKETS: Final = 1 << 16


class ResumeTickets:
    """`key`: the same in all routers of a cluster, and in a router that is started again. b"": a random one, which no
    other router has."""

    def __init__(self, key: bytes = b"", clock: Callable[[], float] = time.time) -> None:
        self._key = key or secrets.token_bytes(32)
        self._clock = clock
        self._resumes: dict[bytes, int] = {}  # by ticket

    def issue(self, digest: bytes, tenant: Tenant, request_id: str, seed: int | None) -> bytes:
        """The ticket of a request that was admitted now. `digest`: see `digest_request`."""
        expiry = (int(self._clock()) + _LIFETIME_SECONDS).to_bytes(_TIME_BYTES)
        return expiry + self._authenticate(expiry, digest, tenant, request_id, seed)

    def accept(self, message: GenerateRequest, digest: bytes, tenant: Tenant) -> bytes:
        """The ticket of `message` if it shows that the request was admitted before, else b"". Counts the resume."""
        ticket = message.resume_ticket
        expiry = ticket[:_TIME_BYTES]
        code = self._authenticate(expiry, digest, tenant, message.request_id, message.sampling.seed)
        if not hmac.compare_digest(ticket[_TIME_BYTES:], code) or int.from_bytes(expiry) < self._clock():
            return b""
        resumes = self._resumes.get(ticket, 0)
        if resumes >= _MAX_RESUMES:
            return b""
        if not resumes and len(self._resumes) >= _MAX_TICKETS:
            del self._resumes[next(iter(self._resumes))]
        self._resumes[ticket] = resumes + 1
        return ticket

    def _authenticate(self, expiry: bytes, digest: bytes, tenant: Tenant, request_id: str, seed: int | None) -> bytes:
        names = json.dumps([tenant.name, request_id, seed]).encode()
        return hmac.digest(self._key, expiry + digest + names, "sha256")


def digest_request(message: GenerateRequest) -> bytes:
    """SHA-256 of the fields that a resume repeats from the first request. Not `request_id` and the seed: the router
    chooses them if the first request has none.

    Two versions of protobuf might serialise a field differently. Then the one does not accept a ticket of the other,
    and the resume is admitted as a new request.
    """
    digest = hashlib.sha256()
    for field, value in message.ListFields():
        if field.name in ("request_id", "resume", "resume_ticket"):
            continue
        for part in _field_parts(field.name, value):
            digest.update(f"{field.number}:{len(part)}:".encode() + part)
    return digest.digest()


def _field_parts(name: str, value: Any) -> Iterator[bytes]:
    """The bytes of a field. None of a `sampling` with only a seed: the first request may have no `sampling` at all."""
    if name == "token_ids" and len(value.ids) > _SLICE:  # one call for a million ids would hold the GIL for 13 ms
        for start in range(0, len(value.ids), _SLICE):
            yield array("I", value.ids[start : start + _SLICE]).tobytes()
    elif name == "sampling":
        repeated = SamplingParams()
        repeated.CopyFrom(value)
        repeated.ClearField("seed")
        if data := repeated.SerializeToString(deterministic=True):
            yield data
    elif isinstance(value, Message):
        yield value.SerializeToString(deterministic=True)
    else:
        yield str(value).encode()
