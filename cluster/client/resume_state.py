"""ResumeState: what one stream's client has been given so far, and the request that asks for the rest.

Pure: it sees events and makes requests. It does not know routers, channels or retries.
"""

from coatcheck.proto.stubs import coatcheck_pb2 as pb


class ResumeState:
    """The half-open range of each choice that the client already holds: token ids [0, len(ids))."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._started: pb.Started | None = None
        self._ids: dict[int, list[int]] = {resumed.choice: list(resumed.token_ids) for resumed in request.resume}
        self._ended: set[int] = set()
        self._scores = 0  # prompt tokens whose log-probabilities the client has ...
        self._scores_seen = 0  # ... and how many this attempt has sent
        self.complete = False

    @property
    def started(self) -> bool:
        """Whether any event has come."""
        return self._started is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that have come, of all choices."""
        return sum(map(len, self._ids.values()))

    def request(self) -> pb.GenerateRequest:
        """The first request as it was, or, once started, with its seed, its id and the token ids that have come."""
        if self._started is None:
            return self._request
        again = pb.GenerateRequest()
        again.CopyFrom(self._request)
        again.request_id = self._started.request_id
        again.sampling.seed = self._started.seed
        del again.resume[:]
        for choice, ids in sorted(self._ids.items()):
            again.resume.add(choice=choice, token_ids=ids)
        return again

    def take(self, event: pb.GenerateEvent) -> pb.GenerateEvent | None:
        """The event, noted; None for one that repeats what a router said before it was lost."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            delta = event.delta
            if delta.choice in self._ended:
                return None
            if delta.token_ids:
                self._ids.setdefault(delta.choice, []).extend(delta.token_ids)
            if delta.finish_reason:
                self._ended.add(delta.choice)
        elif kind == "started":
            self._scores_seen = 0
            if self._started is not None:
                return None
            self._started = event.started
        elif kind == "prompt_logprobs":
            tokens = event.prompt_logprobs.tokens  # a part of the prompt at a time
            known = min(max(self._scores - self._scores_seen, 0), len(tokens))
            self._scores_seen += len(tokens)
            self._scores = max(self._scores, self._scores_seen)
            if known == len(tokens):
                return None
            if known:
                return pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(tokens=tokens[known:]))
        elif kind == "final":
            self.complete = True
        return event
