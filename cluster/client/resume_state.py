"""ResumeState: what the client of one stream has received, and the request for the rest."""

from coatcheck.proto.stubs import coatcheck_pb2 as pb


class ResumeState:
    """The half-open range of each choice that the client already holds: token ids [0, len(ids))."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._started: pb.Started | None = None
        self._ids: dict[int, list[int]] = {resumed.choice: list(resumed.token_ids) for resumed in request.resume}
        self._ended: set[int] = set()
        self._scores = 0  # prompt tokens whose log-probabilities the client has
        self._scores_seen = 0  # and those that this attempt has sent
        self.complete = False

    @property
    def started(self) -> bool:
        """Whether any event has arrived."""
        return self._started is not None

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all choices."""
        return sum(map(len, self._ids.values()))

    def request(self) -> pb.GenerateRequest:
        """The original request, or, after the start, the request with its seed, its id and the received token ids."""
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

    def record_event(self, event: pb.GenerateEvent) -> pb.GenerateEvent | None:
        """Record `event` and return it. Return None for an event that repeats what a lost router had sent."""
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
