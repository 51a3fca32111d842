"""SimulatedGroup: a group of the routing benchmark: a queue, and steps that take time.

Prompts are computed in order of arrival, in chunks beside the decodes. A prompt whose next block is being computed for
another prompt waits for it. Blocks of the host tier are restored at the restore rate. A router reads the group's Load
as from a real group: each report is made at a whole multiple of `report_seconds`.
"""

import math
from collections import deque
from heapq import heappop, heappush

from coatcheck.bench.routing_simulation.service_model import BLOCK, ServiceModel, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_index import BlockHolders, PrefixMatch
from coatcheck.bench.routing_simulation.simulated_tiers import SimulatedTiers
from coatcheck.proto.stubs.worker_pb2 import Load


class SimulatedGroup:
    """`until`: when `advance` must be called next. `place`: number of the group; `holders` is shared by all groups.

    `report` is the last Load and `reports` the number of those made so far. A router that reads them says so with
    `is_watched`; for others nothing is reported, since that takes a third of the time of a run.
    """

    def __init__(self, place: int, model: ServiceModel, holders: BlockHolders) -> None:
        self.name = f"g{place}"
        self.bit = 1 << place
        self.model = model
        self.until = math.inf
        self.holders = holders
        self.tiers = SimulatedTiers(self.bit, holders, model.blocks, model.host_blocks)
        self.queue: deque[SimulatedRequest] = deque()
        self.queued_tokens = 0
        self.work = 0.0
        self.prefill_seconds = 0.0
        self.started: list[SimulatedRequest] = []  # first token since the router last looked
        self.finished: list[SimulatedRequest] = []  # ended since the router last looked
        self._prefilling: list[SimulatedRequest] = []  # in order of arrival; admitted, and without their first token
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []
        self._context = 0
        self._order = 0
        self._submissions = 0  # of all routers
        self._steps = 0  # since the start
        # The run of equal steps in progress.
        self._began = 0.0
        self._run_steps = 0
        self._run_prefills: list[tuple[SimulatedRequest, int]] = []  # requests in prefill, and prompt tokens of each
        self._step_seconds = 0.0
        self.is_watched = False
        self.reports = 0
        self._changed_at = 0.0
        self._reported_at = -math.inf  # -inf if something has changed since the last report
        self.report = Load()
        self.report.status.blocks_total = model.blocks
        self.report.status.prefill_tokens_per_second = model.prefill_rate
        self.report.status.restore_tokens_per_second = model.restore_rate
        self._observe(0.0)

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def outstanding(self) -> int:
        return self.running + len(self.queue)

    def submit(self, job: SimulatedRequest, now: float) -> None:
        self.count_submission(now)
        device, host = self.tiers.match_prefix(job.chain)
        job.estimated_prefill = job.prompt - (device + host) * BLOCK
        self.queued_tokens += job.estimated_prefill
        self.queue.append(job)
        if self.until == math.inf:
            self._begin(now)
        elif not self._prefilling:  # decoding: the prompt joins at the next step
            steps = max(math.ceil((now - self._began) / self._step_seconds - 1e-9), 1)
            if steps < self._run_steps:
                self._run_steps = steps
                self.until = self._began + steps * self._step_seconds

    def count_submission(self, now: float) -> None:
        """Count a request that a router sends, also if the group returns it."""
        self._keep_report(now)
        self._submissions += 1

    def advance(self) -> None:
        """End the run of equal steps, at time `until`, and begin the next one."""
        now = self.until
        self._keep_report(now)
        self._steps += self._run_steps
        if self._run_prefills:
            self.prefill_seconds += now - self._began
        while self._decoding and self._decoding[0][0] <= self._steps:
            job = heappop(self._decoding)[2]
            self._context -= job.prompt + job.output // 2
            self._finish(job, now)
        for job, tokens in self._run_prefills:
            job.remaining -= tokens
            if job.remaining <= 0:
                self._prefilling.remove(job)
                self._finish_prefill(job, now)
        self._begin(now)

    def make_report(self, tick: float) -> None:
        """Bring the report up to `tick`, the last whole multiple of `report_seconds`, if nothing changed since."""
        if tick >= self._changed_at and tick != self._reported_at:
            self._observe(tick)

    def prompt_seconds(self, job: SimulatedRequest, match: PrefixMatch) -> float:
        """The time that the prompt takes if `match` is cached."""
        model = self.model
        return (job.prompt - match.blocks * BLOCK) / model.prefill_rate + match.host * BLOCK / model.restore_rate

    def queued_now(self, now: float) -> float:
        """Prompt tokens still to be computed, exactly."""
        return self.queued_tokens + self._left_at(now)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self.tiers.check([*(job for _, _, job in self._decoding), *self._prefilling])

    def _begin(self, now: float) -> None:
        self._began = now
        decodes = len(self._decoding)
        step = self.model.step(decodes, self._context)
        horizon = self._decoding[0][0] - self._steps if decodes else 1 << 40
        budget = self.model.chunk - decodes
        if not self._prefilling:
            self._admit_next()
        self._run_prefills = []
        if self._prefilling and self._prefilling[0].remaining >= budget:  # whole chunks of one prompt
            head = self._prefilling[0]
            self._run_steps = min(head.remaining // budget, horizon)
            self._run_prefills = [(head, self._run_steps * budget)]
            self._step_seconds = step + budget / self.model.prefill_rate
        elif self._prefilling:  # the end of it, and what else fits into the step
            chunk = 0
            place = 0
            while chunk < budget and (place < len(self._prefilling) or self._admit_next()):
                job = self._prefilling[place]
                tokens = min(job.remaining, budget - chunk)
                self._run_prefills.append((job, tokens))
                chunk += tokens
                place += 1
            self._run_steps = 1
            self._step_seconds = step + chunk / self.model.prefill_rate
        elif decodes:
            self._run_steps, self._step_seconds = horizon, step
        else:
            self._run_steps, self.until = 0, math.inf
            return
        self.until = now + self._run_steps * self._step_seconds

    def _admit_next(self) -> bool:
        """Admit the head of the queue. Return False if it does not fit, or if a prefill in progress computes its next
        block."""
        if not self.queue or self.running >= self.model.max_sequences:
            return False
        job = self.queue[0]
        device, host = self.tiers.match_prefix(job.chain)
        matched = device + host
        if matched < len(job.chain) and any(job.chain[matched] in other.to_register for other in self._prefilling):
            return False
        fresh = -(-(job.prompt + job.output) // BLOCK) - device
        available = self.tiers.available_beside(job.chain[:matched])
        if fresh > available:
            if self.running:
                return False
            fresh = available  # the pool is too small for it: alone, it gets all blocks
        self.queue.popleft()
        self.queued_tokens -= job.estimated_prefill
        self._prefilling.append(job)
        job.to_register = frozenset(job.chain[matched:])
        self.tiers.allocate_blocks(job, matched, fresh)
        job.cached, job.restored = matched * BLOCK, host * BLOCK
        job.remaining = job.prompt - job.cached
        self.work += self.model.work(job.remaining, job.restored, job.prompt + job.output // 2, job.output)
        job.remaining += int(job.restored * self.model.prefill_rate / self.model.restore_rate)
        return True

    def _finish_prefill(self, job: SimulatedRequest, now: float) -> None:
        """The prompt is computed: record the first token, and begin to decode."""
        job.first_token = now
        self.started.append(job)
        self.tiers.register_blocks(job)
        if job.output <= 1:
            self._finish(job, now)
        else:
            self._order += 1
            self._context += job.prompt + job.output // 2
            heappush(self._decoding, (self._steps + job.output - 1, self._order, job))

    def _finish(self, job: SimulatedRequest, now: float) -> None:
        job.ended = now
        self.finished.append(job)
        self.tiers.release_blocks(job)

    def _left_at(self, when: float) -> float:
        if not self._prefilling:
            return 0
        left = sum([job.remaining for job in self._prefilling])
        if not self._run_prefills:
            return left
        done = (when - self._began) / (self._step_seconds * self._run_steps)
        return left - sum([tokens for _, tokens in self._run_prefills]) * min(max(done, 0.0), 1.0)

    def _keep_report(self, now: float) -> None:
        """Make the report that was due before a change."""
        if self.is_watched:
            period = self.model.report_seconds
            self.make_report(math.floor(now / period) * period)
            self._changed_at = now
            self._reported_at = -math.inf

    def _observe(self, when: float) -> None:
        load, status = self.report, self.report.status
        decodes = len(self._decoding)
        status.running = self.running
        status.waiting = len(self.queue)
        status.blocks_used = self.tiers.in_use
        status.blocks_cached = self.tiers.cached
        status.step_seconds = self.model.step(decodes, self._context)
        load.queued_prefill_tokens = int(self.queued_tokens + self._left_at(when))
        load.all_submissions = self._submissions
        load.prefill_seconds = self.prefill_seconds + (when - self._began if self._run_prefills else 0.0)
        self._reported_at = when
        self.reports += 1
