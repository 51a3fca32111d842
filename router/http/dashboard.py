"""Dashboard: a web page on the router's HTTP port, and the JSON object that the page shows.

The page loads nothing from other hosts; its content security policy forbids that.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message
from starlette.responses import Response

from coatcheck.proto.stubs.coatcheck_pb2 import GroupStatus, LatencyStatus, StatusResponse
from coatcheck.router.http.json_response import AsciiJsonResponse

_FILES: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_CACHE_SECONDS: Final = 0.5  # computing percentiles takes a while, and there may be many viewers
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Dashboard:
    def __init__(self, report: Callable[[], StatusResponse]) -> None:
        self._report = report
        self._cached: tuple[float, dict[str, Any]] | None = None
        files = {f"/dashboard/{file.name}": file for file in sorted(_FILES.iterdir()) if file.suffix in _MEDIA_TYPES}
        index = _FILES / "index.html"
        self._files = {"/": index, "/dashboard": index, **files}

    @property
    def endpoints(self) -> dict[str, Callable[[], Awaitable[Response]]]:
        """The endpoints of the page's files and of its state, by path."""
        pages = {
            path: partial(_send, file.read_bytes(), _MEDIA_TYPES[file.suffix]) for path, file in self._files.items()
        }
        return {**pages, "/dashboard/state": self.state}

    async def state(self) -> Response:
        """The state as JSON, at most _CACHE_SECONDS old."""
        now = time.monotonic()
        if self._cached is None or now - self._cached[0] > _CACHE_SECONDS:
            self._cached = (now, state_of(self._report()))
        return AsciiJsonResponse(self._cached[1], headers={"cache-control": "no-store"})


def state_of(status: StatusResponse) -> dict[str, Any]:
    """The JSON object that the page shows."""
    return {
        "time": time.time(),
        "router": status.router,
        "state": status.state,
        "model": _fields(status.model, "name", "dtype", "kv_dtype", "block_size", "max_model_len"),
        "active": status.active_streams,
        "running": sum(group.running for group in status.groups),
        "waiting": sum(group.waiting for group in status.groups),
        "queued": status.queued_requests,
        "queue_seconds": status.queue_seconds,
        "configuration": status.configuration,
        "outcomes": [_fields(outcome, "outcome", "count") for outcome in status.outcomes],
        "generated_tokens": sum(group.generated_tokens for group in status.groups),
        "hit_ratio": status.hit_ratio,
        "latencies": {name: _latency(getattr(status, name)) for name in ("ttft", "tpot", "itl", "queue")},
        "groups": [_group(group) for group in status.groups],
    }


def _group(group: GroupStatus) -> dict[str, Any]:
    found = group.cached_device_tokens + group.cached_host_tokens
    ranks = [_fields(rank, "rank", "healthy", "node", "pid", "steps", "peak_memory_bytes") for rank in group.ranks]
    return {
        **_fields(group, "name", "state", "reason", "running", "waiting", "step_seconds", "restarts", "preemptions"),
        "uptime_seconds": group.uptime_seconds,
        "hit_ratio": found / group.prompt_tokens if group.prompt_tokens else 0.0,
        "device": {"used": group.blocks_used, "cached": group.blocks_cached, "total": group.blocks_total},
        "host": {"used": group.host_blocks_used, "total": group.host_blocks_total},
        "ranks": ranks,
    }


def _fields(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def _latency(latency: LatencyStatus) -> dict[str, Any]:
    percentiles = {name: getattr(latency, f"{name}_seconds") for name in ("p50", "p90", "p99")}
    return {**percentiles, "count": latency.count}


async def _send(data: bytes, media_type: str) -> Response:
    return Response(data, media_type=media_type, headers=HEADERS)
