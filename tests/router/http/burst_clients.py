"""Clients of a burst over HTTP, in a process of their own: a connection for each request, all begun at once.

    python -m tests.router.http.burst_clients HOST:PORT HELD '[[COUNT, KEY, {"prompt": ...}], ...]'

The list says what completions to ask for: COUNT times with this key and body. Prints two JSON lists of answers,
[status, retry-after, seconds]: one when at most HELD requests have none, and one of the others when all have been
answered. Seconds count from the first connection; status 0: the connection ended without an answer.
"""

import json
import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from coatcheck.router.access.connection_limits import raise_open_files_limit


@dataclass(slots=True)
class _Client:
    connection: socket.socket
    unsent: bytes
    answer: bytes = b""

    def go_on(self) -> bool:
        """Sends or reads what can be; whether the server has closed the connection."""
        try:
            if self.unsent:
                self.unsent = self.unsent[self.connection.send(self.unsent) :]
                return False
            part = self.connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:  # most libraries drop an answer that a reset follows
            self.answer = b""
            return True
        self.answer += part
        return not part

    def outcome(self) -> tuple[int, str]:
        """(status, retry-after)."""
        head = self.answer.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:])
        return int(head[0].split()[1]) if head[0] else 0, headers.get("retry-after", "")


def main(address: str, held: str, burst: str) -> None:
    """Ends when the server has closed each connection."""
    host, _, port = address.rpartition(":")
    poll = select.epoll()
    began = time.monotonic()
    clients: dict[int, _Client] = {}
    for request in [request for kind in json.loads(burst) for request in _requests(address, *kind)]:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((host, int(port)))
        clients[connection.fileno()] = _Client(connection, request)
        poll.register(connection, select.EPOLLOUT)
    answers: list[tuple[int, str, float]] = []
    for most_left in (int(held), 0):
        while len(clients) > most_left:
            for descriptor, _ in poll.poll():
                client = clients[descriptor]
                if client.go_on():
                    answers.append((*client.outcome(), time.monotonic() - began))
                    poll.unregister(descriptor)
                    clients.pop(descriptor).connection.close()
                elif not client.unsent:
                    poll.modify(descriptor, select.EPOLLIN)
        print(json.dumps(answers), flush=True)
        answers.clear()


def _requests(address: str, count: int, key: str, body: dict[str, Any]) -> list[bytes]:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return [head.encode() + content] * count


if __name__ == "__main__":
    raise_open_files_limit()
    main(*sys.argv[1:])
