"""ResumeTickets: proofs that a router of this cluster has admitted a request. A resume with its ticket is not refused.

`Started` has the ticket of its request. A client that loses its router sends the ticket to another router, with the
request and the token ids that it has. Like a TLS session ticket (RFC 5077), a ticket holds all that is needed to check
it: routers share a key, but no memory.

    8 bytes    when the ticket expires, in seconds since 1970
    32 bytes   digest of the request: all fields except its id, its seed and `resume`
    32 bytes   HMAC-SHA256 of these 40 bytes, the tenant's name, the request's id and its seed
    16 bytes   the kind of group that computes the request (see group_kind)
    16 bytes   HMAC-SHA256 of all bytes before, cut off

A ticket of an older router ends after 72 bytes. Then the kind of group is not known, and any group may continue.

A ticket admits only the same request of the same tenant, which gives the same tokens again, and at most 16 times at
each router. A forged ticket is refused by its HMAC, before the rest of the message is read: a tenant that has reached
its rate limit must not cost more with one.
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
_HASH_BYTES: Final = 32
_ADMISSION_BYTES: Final = _TIME_BYTES + 2 * _HASH_BYTES
_KIND_BYTES: Final = 16
_TICKET_BYTES: Final = _ADMISSION_BYTES + 2 * _KIND_BYTES
# Max characters of a request id. validate_request admits no longer one, and a megabyte would block the event loop.
_LONGEST_ID: Final = 256
# Resumes with one ticket at one router. A stream is rarely lost more often, and each resume may compute it anew.
_MAX_RESUMES: Final = 16
_SLICE: Final = 16384  # token ids
# A router counts the resumes of this many tickets. For one more it forgets the ticket that was first redeemed first.
_MAX_TICKETS: Final = 1 << 16


class ResumeTickets:
    """`key`: the same at all routers of a cluster, also after a router is started again. b"": a random key, which no
    other router has."""

    def __init__(self, key: bytes = b"", clock: Callable[[], float] = time.time) -> None:
        self._key = key or secrets.token_bytes(32)
        self._clock = clock
        self._resumes: dict[bytes, int] = {}  # by ticket

    def issue(self, digest: bytes, tenant: Tenant, request_id: str, seed: int | None) -> bytes:
        """The ticket of a request that was admitted now, without a kind. `digest`: see `digest_request`."""
        signed = (int(self._clock()) + _LIFETIME_SECONDS).to_bytes(_TIME_BYTES) + digest
        return signed + self._authenticate(signed, tenant, request_id, seed)

    def add_kind(self, ticket: bytes, kind: bytes) -> bytes:
        """The ticket with another kind of group, or with its first."""
        signed = ticket[:_ADMISSION_BYTES] + kind
        return signed + hmac.digest(self._key, signed, "sha256")[:_KIND_BYTES]

    def read_kind(self, ticket: bytes) -> bytes:
        """The kind of group in a ticket of this cluster; b"" if it has none. Whether the ticket still admits a request
        does not matter."""
        signed = ticket[:-_KIND_BYTES]
        if len(ticket) != _TICKET_BYTES:
            return b""
        expected = hmac.digest(self._key, signed, "sha256")[:_KIND_BYTES]
        return signed[-_KIND_BYTES:] if hmac.compare_digest(ticket[-_KIND_BYTES:], expected) else b""

    def redeem(self, message: GenerateRequest, tenant: Tenant) -> bytes:
        """The digest of the request that the ticket of `message` admits; the caller must compare it with the digest of
        `message`. b"" if the ticket is not one of this cluster for this tenant, request id and seed, if it has expired,
        or if this router has redeemed it 16 times. Takes microseconds, whatever the size of the message."""
        if len(message.resume_ticket) not in (_ADMISSION_BYTES, _TICKET_BYTES) or len(message.request_id) > _LONGEST_ID:
            return b""
        ticket = message.resume_ticket[:_ADMISSION_BYTES]
        signed, code = ticket[:-_HASH_BYTES], ticket[-_HASH_BYTES:]
        expected = self._authenticate(signed, tenant, message.request_id, message.sampling.seed)
        if not hmac.compare_digest(code, expected) or int.from_bytes(signed[:_TIME_BYTES]) < self._clock():
            return b""
        resumes = self._resumes.get(ticket, 0)
        if resumes >= _MAX_RESUMES:
            return b""
        if not resumes and len(self._resumes) >= _MAX_TICKETS:
            del self._resumes[next(iter(self._resumes))]
        self._resumes[ticket] = resumes + 1
        return signed[_TIME_BYTES:]

    def _authenticate(self, signed: bytes, tenant: Tenant, request_id: str, seed: int | None) -> bytes:
        names = json.dumps([tenant.name, request_id, seed]).encode()
        return hmac.digest(self._key, signed + names, "sha256")


def digest_request(message: GenerateRequest) -> bytes:
    """SHA-256 of the fields that a resume repeats from the first request. `request_id` and the seed are left out,
    because the router chooses them if the first request has none.

    Two versions of protobuf might serialise a field differently. Then routers with one version refuse tickets of
    routers with the other one, and the resume is admitted as a new request. Call `check_entries` first: to serialise
    millions of entries holds the GIL for over half a second.
    """
    digest = hashlib.sha256()
    for field, value in message.ListFields():
        if field.name in ("request_id", "resume", "resume_ticket"):
            continue
        for part in _field_parts(field.name, value):
            digest.update(f"{field.number}:{len(part)}:".encode() + part)
    return digest.digest()


def _field_parts(name: str, value: Any) -> Iterator[bytes]:
    """The bytes of a field, in parts. No part for a `sampling` with only a seed: the first request may have no
    `sampling` at all."""
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
