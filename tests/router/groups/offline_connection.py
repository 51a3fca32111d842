"""OfflineConnection: a GroupConnection without a group: submissions are counted and delivered, and nothing is sent."""

import random

from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration, SnapshotChunk
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.open_submissions import OpenSubmissions
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.routing.prefix_index import PrefixIndex
from coatcheck.router.routing.routing_cost import Candidate, Candidates, choose_group

MODEL = GetModelResponse(name="tiny", block_size=4)


class OfflineConnection(GroupConnection):
    """Create it inside an event loop. `aborts`: (id, choice) of each abort; `snapshots`: the reasons."""

    def __init__(self) -> None:  # without a stream and its task
        self.endpoint = GroupEndpoint("g", "")
        self.registration = Registration(group="g", model=MODEL)
        self.group_kind = b""
        self.load = GroupLoad(self.registration)
        self.index = PrefixIndex()
        self.index.add_group("g", "1")
        self.index.apply_snapshot("g", SnapshotChunk(epoch="1", first=True, last=True))
        self.submissions = OpenSubmissions()
        self.aborts: list[tuple[int, int | None]] = []
        self.snapshots: list[str] = []
        self.room_notices = self.change_notices = 0
        self.on_room = self._count_room
        self.on_change = self._count_change

    def open(self, id: int = 1, *, choices: int = 1, prompt_tokens: int = 13) -> Submission:
        """A request of which nothing is cached."""
        request = Request(str(id), range(prompt_tokens), SamplingParams(n=choices, max_tokens=1, seed=1))
        decision = choose_group(Candidates.of([Candidate("g")]), prompt_tokens, random.Random(1))
        submission = Submission(self, request, decision, id)
        self.submissions.add(submission)
        return submission

    def send_abort(self, id: int, choice: int | None) -> None:
        self.aborts.append((id, choice))

    def request_snapshot(self, reason: str) -> None:
        self.snapshots.append(reason)

    def _count_room(self) -> None:
        self.room_notices += 1

    def _count_change(self) -> None:
        self.change_notices += 1
