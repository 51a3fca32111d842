"""pod_events(): lines of `coatcheck serve` as events of its pod, for `kubectl describe pod` and `kubectl get events`.

The API server is called with the token of the pod's service account, which must be allowed to create, get and patch
events. Kubernetes deletes an event after an hour. If the same line comes again before that, the event's count goes up.
The name of an event contains a hash of its reason and line, so a new `serve` finds the event of an earlier one.
"""

import hashlib
import http.client
import json
import os
import queue
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError

from coatcheck.cluster.session.serve_lines import Notice, without_brackets
from coatcheck.proto.errors import CoatcheckError, InvalidConfig

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts the account's files
_VARIABLES: Final = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "POD_NAME", "POD_UID")
_MAX_MESSAGE_BYTES: Final = 1024  # of Kubernetes
_MAX_WAITING: Final = 100  # events; more are dropped while the API server does not answer
_ANSWER_SECONDS: Final = 5.0
_PAUSES: Final = (1.0, 4.0, 16.0)  # seconds before each further attempt
_CLOSE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Pod:
    """The pod of this process, and how it reaches the API server. `account`: the folder of the service account."""

    name: str
    uid: str
    namespace: str
    api: str
    account: Path

    @classmethod
    def find(cls, environment: Mapping[str, str], account: Path) -> "Pod":
        """The pod that the environment and the account's files name. Raises InvalidConfig if one is missing."""
        if missing := [name for name in _VARIABLES if not environment.get(name)]:
            raise InvalidConfig(
                f"--kubernetes-events needs {', '.join(missing)} in the environment; leave the flag out outside a pod, "
                "and give the pod POD_NAME and POD_UID by fieldRef (metadata.name, metadata.uid)"
            )
        host, port, name, uid = (environment[name] for name in _VARIABLES)
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise InvalidConfig(
                f"--kubernetes-events needs the token of a service account: {error}; mount it, or leave the flag out"
            ) from None
        api = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        return cls(name, uid, namespace, api, account)


@contextmanager
def pod_events(
    say: Callable[[str], None], environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT
) -> Iterator[Callable[[Notice], None]]:
    """Yield a function that records a notice as an event and does not wait. A CoatcheckError that ends the block is
    recorded too. `say` prints a warning if Kubernetes refuses events. Raises InvalidConfig outside a pod."""
    recorder = _Recorder(Pod.find(environment, account), say)
    try:
        yield recorder.record
    except CoatcheckError as error:
        recorder.record(Notice(f"error: {error}", "ServeFailed", is_warning=True))
        raise
    finally:
        recorder.close()


class _Recorder:
    """Sends events in a thread of its own, one after another."""

    def __init__(self, pod: Pod, say: Callable[[str], None]) -> None:
        self._pod = pod
        self._say = say
        self._notices: queue.Queue[Notice | None] = queue.Queue(_MAX_WAITING)
        self._is_closing = threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_forever, name="kubernetes-events", daemon=True)
        self._thread.start()

    def record(self, notice: Notice) -> None:
        """Send a notice that has a reason. If too many wait, it is dropped."""
        if notice.reason and not self._notices.full():
            self._notices.put(notice)

    def close(self) -> None:
        """Send the waiting events, for at most 5 s."""
        self._is_closing.set()
        if not self._notices.full():
            self._notices.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _send_forever(self) -> None:
        while (notice := self._notices.get()) is not None:
            for pause in (*_PAUSES, None):
                try:
                    self._send(notice)
                    break
                except (OSError, http.client.HTTPException, ValueError) as error:  # an HTTPError is an OSError
                    if pause is None or self._is_closing.wait(pause):
                        self._warn(error)
                        break

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(
                f"warning: Kubernetes refuses events: {error}; allow the pod's service account to create, get and "
                "patch events, or leave out --kubernetes-events"
            )

    def _send(self, notice: Notice) -> None:
        """Create the event of a notice, or increase its count if it exists."""
        event = make_event(self._pod, notice, datetime.now(UTC))
        try:
            self._call("POST", "", event)
        except HTTPError as error:
            if error.code != http.HTTPStatus.CONFLICT:
                raise
            name = event["metadata"]["name"]
            count = int(self._call("GET", name).get("count") or 1) + 1
            counted = {"count": count, "message": event["message"], "lastTimestamp": event["lastTimestamp"]}
            self._call("PATCH", name, counted)

    def _call(self, method: str, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call the events API, and return its answer. `name`: the name of an event; "" for the collection. Raises
        OSError, HTTPException or ValueError. `msg` of an HTTPError is the server's message."""
        path = f"/api/v1/namespaces/{self._pod.namespace}/events{f'/{name}' if name else ''}"
        token = (self._pod.account / "token").read_text().strip()  # each time: Kubernetes replaces it every hour
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self._pod.api + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=self._pod.account / "ca.crt")
        opener = urllib.request.build_opener(  # the API server is in the cluster: no proxy
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            error.msg = _reason_of(error)
            raise


def make_event(pod: Pod, notice: Notice, now: datetime) -> dict[str, Any]:
    """The core/v1 Event of a notice. Notices get one name if their lines differ only in parts in brackets, such as
    numbers and files."""
    what = hashlib.blake2b(f"{notice.reason} {without_brackets(notice.line)}".encode(), digest_size=8).hexdigest()
    message = notice.line.removeprefix("error: ").removeprefix("warning: ")
    time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    of_pod = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "namespace": pod.namespace, "uid": pod.uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod.name}.{what}", "namespace": pod.namespace},
        "involvedObject": of_pod,
        "type": "Warning" if notice.is_warning else "Normal",
        "reason": notice.reason,
        "message": message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore"),
        "source": {"component": "coatcheck"},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


def _reason_of(error: HTTPError) -> str:
    """The message of the Status object in the body of the error; without one, the HTTP reason phrase."""
    try:
        return str(json.load(error)["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.msg
