"""Engine: one group's serving loop, a step at a time, without Ray and without gRPC.

    submit(request) ... while has_work: step() -> StepOutput

It turns requests into sequences, asks the scheduler what to compute, has the runner compute it, and turns sampled
tokens into outputs. `pipeline_depth` 1 launches step N + 1 before it waits for step N (worth it where the launch is
asynchronous, as on GPUs). It does not know how many ranks compute, nor who reads the outputs. Not thread-safe:
one thread owns it.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable

from coatcheck.proto.errors import CoatcheckError, DeadlineExceeded, InvalidRequest
from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.runner_protocol import Runner, StepResult
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_output import (
    EngineStats,
    FinishReason,
    KvEvent,
    SequenceOutput,
    StepOutput,
    TokenLogprob,
)
from coatcheck.workers.engine.deadlines import Deadlines
from coatcheck.workers.engine.engine_stats import Throughput
from coatcheck.workers.engine.in_flight import InFlight
from coatcheck.workers.engine.input_processor import InputProcessor
from coatcheck.workers.engine.scheduler import Scheduler, SchedulerConfig
from coatcheck.workers.engine.straggler_signal import StragglerSignal
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.eviction_policy import create_policy
from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.prefix_registry import PrefixRegistry, choose_max_ghosts
from coatcheck.workers.structured.grammar_backend import GrammarBackend
from coatcheck.workers.structured.grammar_registry import MAX_CACHED_GRAMMARS, GrammarRegistry


class Engine:
    """Owns the scheduler; the scheduler owns the pool."""

    def __init__(
        self,
        spec: ModelSpec,
        runner: Runner,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 512,
        max_model_len: int | None = None,
        host_blocks: int = 0,
        eviction: str = "cost",
        pipeline_depth: int = 0,
        grammars: GrammarBackend | None = None,
        grammars_kept: int = MAX_CACHED_GRAMMARS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        # What the pool can hold alone bounds a sequence as the model's context does.
        self.max_model_len = min(max_model_len or spec.max_model_len, spec.max_model_len, num_blocks * block_size)
        config = SchedulerConfig(block_size, max_num_seqs, max_batch_tokens, spec.attention_crossover)
        self._prefix_registry = registry = PrefixRegistry(choose_max_ghosts(num_blocks + host_blocks))
        # Each tier has a policy of its own; the reuse rates that they use are shared.
        on_device, on_host = (create_policy(eviction, registry.reuse_table) for _ in range(2))
        pool = BlockPool(num_blocks, Evictor(registry, on_device, num_blocks, Tier.DEVICE))
        host = HostPool(host_blocks, Evictor(registry, on_host, host_blocks, Tier.HOST)) if host_blocks else None
        self.scheduler = Scheduler(config, pool, host)
        self.throughput = Throughput()
        self._slowness = StragglerSignal(spec.attention_crossover)
        self._runner = runner
        self._depth = pipeline_depth
        self._intake = InputProcessor(
            spec,
            block_size=block_size,
            max_model_len=self.max_model_len,
            grammars=grammars or GrammarBackend(None, "structured output is not served here"),
            book=self._prefix_registry,
            clock=clock,
        )
        self._clock = clock
        self._in_flight: deque[InFlight] = deque()
        self._sequences: dict[str, list[Sequence]] = {}
        self._ended_early: list[SequenceOutput] = []
        self._deadlines = Deadlines()
        self._grammars = GrammarRegistry(grammars_kept)
        self._refused: list[tuple[str, CoatcheckError]] = []
        self._confirmed_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        to_report = self._ended_early or self._refused
        return bool(self._sequences or self._in_flight or to_report or self.scheduler.tiers.has_copies)

    def submit_request(self, request: EngineRequest) -> None:
        """Queues every choice of a request; raises InvalidRequest or NeverFits, and then nothing has changed. One whose
        grammar is new is queued, or refused by a later step, when every rank has compiled it."""
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is already running; choose another")
        choices = self._intake.take(request, self._grammars.ready_id(request.sampling.structured))
        if request.retention is not None:
            prompt_blocks = len(request.prompt_token_ids) // self.block_size
            self.scheduler.tiers.requeue_blocks(choices[0].block_hashes[:prompt_blocks])
        self._sequences[request.request_id] = choices
        for sequence in choices:
            self._deadlines.note(sequence)
        if self._grammars.add_request(choices):
            self._queue(choices)

    def abort_request(self, request_id: str, choice: int | None = None) -> None:
        """Drops a request, or one choice of it, and frees its blocks; unknown ones are already gone."""
        for sequence in list(self._sequences.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._forget(sequence)

    def step(self) -> StepOutput:
        """Plans and launches a step, then reports the oldest one in flight."""
        started = self._clock()
        self._prefix_registry.advance_clock(started)
        self._drop_overdue(started)
        plan, sequences = self.scheduler.schedule()
        self._grammars.fill_plan(plan)
        if not plan.is_idle or not self._in_flight:  # with nothing to compute, an empty plan is the ranks' heartbeat
            self._in_flight.append(InFlight(plan, sequences, self._runner.launch(plan), started))
        if plan.rows and len(self._in_flight) <= self._depth:
            return StepOutput(plan.step, [], self.scheduler.tiers.drain_events())
        return self._confirm(self._in_flight.popleft())

    def stats(self) -> EngineStats:
        """Counts as of now."""
        pool = self.scheduler.pool.stats()
        waiting = [*self.scheduler.waiting, *self._grammars.waiting_sequences()]
        unplanned = [s.num_uncomputed for s in self.scheduler.running]
        unplanned += [s.num_foreseen for s in waiting]
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(waiting),
            blocks_total=pool.total,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            queued_prefill_tokens=sum(count for count in unplanned if count > 1),
            preemptions=self.scheduler.num_preemptions,
            slowness=self._slowness.value,
            **self.throughput.counts(),
            **self.scheduler.tiers.stats(),
        )

    def unstarted_requests(self) -> set[str]:
        """Requests of which no choice was ever part of a step; not those whose grammar is being compiled, which may be
        what ends the group."""
        waiting = {s.request.request_id for s in self.scheduler.waiting if not (s.started_at or s.num_preemptions)}
        return waiting - {s.request.request_id for s in self.scheduler.running}

    def update_copy_costs(self, copies: CopyReport | None) -> None:
        """Takes how fast ranks copy (None: as before) and compute into what copies are weighed by."""
        rate, step_seconds = self.throughput.prefill_tokens_per_second, self.throughput.step_seconds
        self.scheduler.tiers.update_copy_cost(copies, tokens_per_second=rate, step_seconds=step_seconds)

    def snapshot_blocks(self) -> list[KvEvent]:
        """Every prefix block held; events drained before it are part of it."""
        return self.scheduler.tiers.snapshot()

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self.scheduler.check()
        self._grammars.check((*self.scheduler.waiting, *self.scheduler.running))
        known = {id(sequence) for choices in self._sequences.values() for sequence in choices}
        queued = {
            id(sequence)
            for sequence in (*self.scheduler.waiting, *self.scheduler.running, *self._grammars.waiting_sequences())
        }
        assert queued == known, "a sequence is lost or left behind"

    def _drop_overdue(self, now: float) -> None:
        for request_id in self._deadlines.overdue(
            itertools.chain(self.scheduler.waiting, self._grammars.waiting_sequences()), now
        ):
            self._refuse(request_id, DeadlineExceeded("it had not begun when its deadline came; allow more time"))

    def _confirm(self, done: InFlight) -> StepOutput:
        result = done.launched.wait()
        outputs, self._ended_early = self._ended_early, []
        for index, row, sequence in done.confirm(result):
            if index in result.failed:
                self._grammars.mark_failed(sequence)
                self._refuse(sequence.request.request_id, InvalidRequest(result.failed[index]))
                continue
            self._intake.name_blocks(sequence)
            if sequence.num_registered < sequence.num_computed // self.block_size:
                self.scheduler.register(sequence)
            scored = sequence.take_prompt_logprobs(row.start, result.prompt_logprobs.get(index, []))
            if row.sample:
                outputs.append(self._output(sequence, index, result, scored))
            elif scored:
                outputs.append(SequenceOutput(sequence.request.request_id, sequence.choice, [], prompt_logprobs=scored))
        if result.copies is not None:
            self.scheduler.settle(result.copies)
        if result.num_compiled is not None:
            self._settle_grammars(result.num_compiled)
        now = self._clock()
        seconds, self._confirmed_at = now - max(done.started, self._confirmed_at), now
        self.throughput.record(done.plan, seconds)
        self._slowness.record(done.plan, seconds, now)
        self.update_copy_costs(result.copies)
        prefill = sum(row.num_tokens for row in done.plan.rows if row.num_tokens > 1)
        decodes = done.plan.num_tokens - prefill
        events = self.scheduler.tiers.drain_events()
        refused, self._refused = self._refused, []
        return StepOutput(done.plan.step, outputs, events, prefill, decodes, seconds, refused)

    def _queue(self, choices: list[Sequence]) -> None:
        for sequence in list(choices):
            ended = sequence.end_after(sequence.token_ids[-1]) if sequence.num_outputs else None
            if ended:  # another group had delivered all of it, save the word that it had ended
                output = SequenceOutput(sequence.request.request_id, sequence.choice, [])
                self._ended_early.append(self._end(sequence, output))
            else:
                self.scheduler.add(sequence)

    def _settle_grammars(self, ready: tuple[int, ...]) -> None:
        for number, choices in self._grammars.record_compiled(ready):
            try:
                self._intake.check_grammar(choices[0].request, number)
            except CoatcheckError as error:
                self._refuse(choices[0].request.request_id, error)
            else:
                self._queue(choices)

    def _refuse(self, request_id: str, error: CoatcheckError) -> None:
        self._refused.append((request_id, error))
        self.abort_request(request_id)

    def _output(
        self, sequence: Sequence, index: int, result: StepResult, prompt_logprobs: list[TokenLogprob]
    ) -> SequenceOutput:
        output = SequenceOutput(sequence.request.request_id, sequence.choice, [result.token_ids[index]])
        output.prompt_logprobs = prompt_logprobs
        if index in result.logprobs:
            output.logprobs = [result.logprobs[index]]
        self.throughput.generated_tokens += 1
        if not sequence.reported:
            sequence.report_beginning(output, self._clock())
            self.throughput.admitted(sequence)
        return self._end(sequence, output) if sequence.end_after(output.token_ids[-1]) else output

    def _end(self, sequence: Sequence, output: SequenceOutput) -> SequenceOutput:
        last = sequence.token_ids[-1]
        output.finish_reason = sequence.finish_reason = sequence.end_after(last)
        output.stop_token_id = last if output.finish_reason is FinishReason.STOP else None
        self._forget(sequence)
        return output

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._grammars.remove_sequence(sequence)
        choices = self._sequences[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self._sequences[sequence.request.request_id]
