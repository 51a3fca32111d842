"""ResumeState: what a client has received of one stream, and the request for the rest."""

from coatcheck.proto.stubs import coatcheck_pb2 as pb


class ResumeState:
    """The token ids received for each choice, and the number of log-probabilities received for the prompt."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._started: pb.Started | None = None
        self._ids: dict[int, list[int]] = {resumed.choice: list(resumed.token_ids) for resumed in request.resume}
        self._resume_ticket = request.resume_ticket
        self._ended: set[int] = set()
        self._prompt_logprobs = 0  # number received, from all routers
        self._router_prompt_logprobs = 0  # number sent by the current router
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
        """The original request. After Started: the request with its seed, its id, its newest ticket and the received
        token ids."""
        if self._started is None:
            return self._request
        resumed_request = pb.GenerateRequest()
        resumed_request.CopyFrom(self._request)
        resumed_request.request_id = self._started.request_id
        resumed_request.sampling.seed = self._started.seed
        resumed_request.resume_ticket = self._resume_ticket
        del resumed_request.resume[:]
        for choice, ids in sorted(self._ids.items()):
            resumed_request.resume.add(choice=choice, token_ids=ids)
        return resumed_request

    def forget_ticket(self) -> bool:
        """Send no ticket until a router gives another one. Returns whether there was a ticket to forget."""
        had_ticket = self.started and bool(self._resume_ticket)
        self._resume_ticket = b""
        return had_ticket

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
            self._resume_ticket = delta.resume_ticket or self._resume_ticket
        elif kind == "started":
            self._router_prompt_logprobs = 0
            # A router of an older version sends no ticket. The next router may accept the former one.
            self._resume_ticket = event.started.resume_ticket or self._resume_ticket
            if self._started is not None:
                return None
            self._started = event.started
        elif kind == "prompt_logprobs":
            tokens = event.prompt_logprobs.tokens  # a part of the prompt at a time
            known = min(max(self._prompt_logprobs - self._router_prompt_logprobs, 0), len(tokens))
            self._router_prompt_logprobs += len(tokens)
            self._prompt_logprobs = max(self._prompt_logprobs, self._router_prompt_logprobs)
            if known == len(tokens):
                return None
            if known:
                return pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(tokens=tokens[known:]))
        elif kind == "final":
            self.complete = True
        return event
