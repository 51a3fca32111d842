"""Engine: one group's serving loop, step by step, without Ray and without gRPC.

    submit_request(request) ... while has_work: step() -> StepOutput

A step plans what to compute next (Scheduler), launches the plan on the ranks (Runner), and turns the result of the
oldest launched step into outputs. With `pipeline_depth` 1 the engine launches step N + 1 before it waits for step N,
which pays where a launch is asynchronous, as on GPUs.

An engine is not thread-safe: one thread owns it (see EngineLoop).
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coatcheck.proto.errors import CoatcheckError, DeadlineExceeded, InvalidRequest
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.runner_protocol import CopyReport, LaunchedStep, Runner, StepResult
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_output import EngineStats, FinishReason, SequenceOutput, StateSnapshotStats, StepOutput
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.drafter import Drafter
from coatcheck.workers.engine.input_processor import InputProcessor
from coatcheck.workers.engine.scheduler import Scheduler
from coatcheck.workers.engine.step_statistics import StepStatistics
from coatcheck.workers.kv.cache_snapshot import CacheSnapshot
from coatcheck.workers.kv.kv_cache_manager import build_kv_cache
from coatcheck.workers.structured.grammar_backend import GrammarBackend
from coatcheck.workers.structured.grammar_registry import MAX_CACHED_GRAMMARS, GrammarRegistry


@dataclass(slots=True)
class _StepInFlight:
    """A launched step. `sequences`: those of `plan.scheduled`, in its order, so a sequence with draft tokens is there
    more than once. `preemptions`: the `num_preemptions` of each of `sequences` when the step was planned."""

    plan: StepPlan
    sequences: list[Sequence]
    preemptions: list[int]
    launched: LaunchedStep
    started_at: float


class Engine:
    """`num_blocks`, `host_blocks`: blocks of the KV pool and of the host tier.

    `num_snapshots`: the runner's slots for snapshots of states. With 0, a model that keeps states has no prefix cache,
    because it can start a prompt only at a snapshot.

    `max_draft_tokens`: of one sequence in one step (speculative decoding by prompt lookup); 0 for none. Drafts need
    `pipeline_depth` 0, because they follow the tokens of the step before. Models with states get none.
    """

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
        num_snapshots: int = 0,
        eviction: str = "cost",
        pipeline_depth: int = 0,
        max_draft_tokens: int = 0,
        grammars: GrammarBackend | None = None,
        grammars_kept: int = MAX_CACHED_GRAMMARS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        snapshot_slots = range(max_num_seqs, max_num_seqs + num_snapshots)
        kv_cache = build_kv_cache(
            num_blocks, host_blocks, block_size, eviction, spec.attention_crossover, snapshot_slots
        )
        self.has_prefix_cache = not spec.state_layers or num_snapshots > 0
        self.spec = spec
        self.block_size = block_size
        assert not (pipeline_depth and max_draft_tokens), "a pipelined engine plans before it knows the last token"
        self._drafter = Drafter(max_draft_tokens) if max_draft_tokens and not spec.state_layers else None
        # A sequence that runs alone must fit in the pool.
        self.max_model_len = min(max_model_len or spec.max_model_len, spec.max_model_len, num_blocks * block_size)
        self.scheduler = Scheduler(
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            attention_crossover=spec.attention_crossover,
            drafter=self._drafter,
        )
        self._input_processor = InputProcessor(
            spec,
            block_size=block_size,
            max_model_len=self.max_model_len,
            has_prefix_cache=self.has_prefix_cache,
            grammars=grammars or GrammarBackend(None, "this engine was made without grammars"),
            prefixes=kv_cache.registry,
            clock=clock,
        )
        self._kv_cache = kv_cache
        self._grammars = GrammarRegistry(grammars_kept)
        self._statistics = StepStatistics(spec.attention_crossover)
        self._runner = runner
        self._pipeline_depth = pipeline_depth
        self._clock = clock
        self._in_flight: deque[_StepInFlight] = deque()
        self._sequences: dict[str, list[Sequence]] = {}  # the live choices of each request
        self._unstarted: dict[str, float] = {}  # deadline of each live request of which no choice was ever in a plan
        self._next_deadline = math.inf  # lower bound of these deadlines
        self._last_confirmed_at = 0.0
        # Reported by the next step.
        self._ended_early: list[SequenceOutput] = []
        self._refused: list[tuple[str, CoatcheckError]] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        to_report = self._ended_early or self._refused
        return bool(self._sequences or self._in_flight or to_report or self._kv_cache.has_copies)

    def submit_request(self, request: EngineRequest) -> None:
        """Queue every choice of a request. If the grammar is not compiled yet, the request is queued or refused once
        every rank has compiled the grammar. Raises InvalidRequest or NeverFits, and then changes nothing."""
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is already running; choose another")
        grammar_id = self._grammars.ready_id(request.sampling.structured)
        choices = self._input_processor.make_sequences(request, grammar_id)
        if request.retention is not None:
            prompt_blocks = len(request.prompt_token_ids) // self.block_size
            self._kv_cache.requeue_blocks(choices[0].block_hashes[:prompt_blocks])
        self._sequences[request.request_id] = choices
        self._unstarted[request.request_id] = choices[0].deadline
        self._next_deadline = min(self._next_deadline, choices[0].deadline)
        if self._grammars.add_request(choices):
            self._queue_sequences(choices)

    def abort_request(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one choice of it, and free its blocks. No effect on a request that has ended."""
        for sequence in list(self._sequences.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._remove_sequence(sequence)

    def step(self) -> StepOutput:
        """Plan and launch a step, then report the oldest step in flight."""
        now = self._clock()
        self._kv_cache.registry.advance_clock(now)
        self._refuse_overdue(now)
        plan, sequences = self.scheduler.schedule()
        if plan.new_sequences:
            for sequence in self.scheduler.running:
                self._unstarted.pop(sequence.request.request_id, None)
        self._grammars.fill_plan(plan)
        if not plan.is_idle or not self._in_flight:  # an idle engine launches empty plans, as the ranks' heartbeat
            preemptions = [sequence.num_preemptions for sequence in sequences]
            self._in_flight.append(_StepInFlight(plan, sequences, preemptions, self._runner.launch(plan), now))
        if plan.scheduled and len(self._in_flight) <= self._pipeline_depth:
            return StepOutput(plan.step, [], self._kv_cache.drain_events())
        return self._confirm_step(self._in_flight.popleft())

    def stats(self) -> EngineStats:
        """Counters since the start, and the present load."""
        pool, host, copy_cost = self.scheduler.pool, self._kv_cache.host, self._kv_cache.copy_cost
        waiting = [*self.scheduler.waiting, *self._grammars.waiting_sequences()]
        unplanned = [s.num_unscheduled for s in self.scheduler.running]
        unplanned += [s.num_expected_tokens for s in waiting]
        measured = self._statistics
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(waiting),
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_blocks - pool.num_available,
            blocks_cached=len(pool.evictor),
            queued_prefill_tokens=sum(count for count in unplanned if count > 1),
            prompt_tokens=measured.prompt_tokens,
            cached_device_tokens=measured.cached_device_tokens,
            cached_host_tokens=measured.cached_host_tokens,
            generated_tokens=measured.generated_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=measured.steps,
            prefill_seconds=measured.prefill_seconds,
            prefill_tokens_per_second=measured.prefill_tokens_per_second,
            step_seconds=measured.step_seconds,
            host_blocks_total=host.num_blocks,
            host_blocks_used=host.num_held,
            demotions=host.num_demotions,
            restores=host.num_restores,
            integrity_failures=host.num_corrupt,
            device_evictions=dict(pool.evictor.num_evictions),
            host_evictions=dict(host.evictor.num_evictions),
            prefix_misses=dict(measured.prefix_misses),
            demote_seconds=copy_cost.demote,
            restore_seconds=copy_cost.restore,
            slowness=measured.slowness,
            snapshots=StateSnapshotStats() if pool.states is None else pool.states.stats(),
            draft_tokens=0 if self._drafter is None else self._drafter.num_drafted,
            accepted_draft_tokens=0 if self._drafter is None else self._drafter.num_accepted,
        )

    def unstarted_requests(self) -> set[str]:
        """Ids of the requests of which no choice was ever in a plan. Requests whose grammar is being compiled are left
        out, because the compilation may have crashed the group."""
        return self._unstarted.keys() - {s.request.request_id for s in self._grammars.waiting_sequences()}

    def update_copy_costs(self, copy_report: CopyReport | None) -> None:
        """Update the measured costs by which the KV cache chooses between copying and computing. `copy_report`: None if
        the ranks have no new measurement."""
        measured = self._statistics
        self._kv_cache.copy_cost.update(
            copy_report, tokens_per_second=measured.prefill_tokens_per_second, step=measured.step_seconds
        )

    def reset_prefix_cache(self) -> None:
        """Evict every cached block that no running sequence uses. Call this between two steps."""
        self._kv_cache.reset_prefix_cache()

    def begin_snapshot(self) -> CacheSnapshot:
        """All prefix blocks that the group holds, to be read in chunks. Call this, and read each chunk, between two
        steps, when the events of all earlier steps have been reported."""
        return self._kv_cache.begin_snapshot()

    def check(self) -> None:
        """Raises AssertionError unless every live sequence is queued once and all parts of the engine agree."""
        in_scheduler = (*self.scheduler.waiting, *self.scheduler.running)
        self.scheduler.check()
        self._grammars.check(in_scheduler)
        known = {id(sequence) for choices in self._sequences.values() for sequence in choices}
        queued = {id(sequence) for sequence in (*in_scheduler, *self._grammars.waiting_sequences())}
        assert queued == known, "a sequence is lost or left behind"
        assert self._unstarted.keys() <= self._sequences.keys(), "an ended request is said to wait"

    def _refuse_overdue(self, now: float) -> None:
        """Refuse the requests that have not started by their deadline. Routers abort the started ones."""
        if now < self._next_deadline:
            return
        overdue = [request_id for request_id, deadline in self._unstarted.items() if deadline <= now]
        for request_id in overdue:
            error = DeadlineExceeded("the request had not started at its deadline; allow more time")
            self._refuse_request(request_id, error)
        self._next_deadline = min(self._unstarted.values(), default=math.inf)

    def _queue_sequences(self, choices: list[Sequence]) -> None:
        for sequence in list(choices):
            if sequence.num_outputs and sequence.finish_reason_after(sequence.token_ids[-1]):
                # Another group delivered all tokens of this choice, but not its finish reason.
                output = SequenceOutput(sequence.request.request_id, sequence.choice, [])
                self._finish_sequence(sequence, output)
                self._ended_early.append(output)
            else:
                self.scheduler.add_sequence(sequence)

    def _confirm_step(self, step: _StepInFlight) -> StepOutput:
        """Wait for a step's result, apply it, and report it."""
        result = step.launched.wait()
        outputs, self._ended_early = self._ended_early, []
        num_planned = len(step.sequences) - len(step.plan.drafts)
        for index in range(num_planned):
            if (output := self._confirm_sequence(step, index, result)) is not None:
                outputs.append(output)
            step.sequences[index].forced_token_ids = result.forced.get(index, [])
        if step.plan.drafts:
            self._confirm_drafts(step, num_planned, result, outputs)
        if result.copy_report is not None:
            self.scheduler.record_copies(result.copy_report)
        if result.num_compiled is not None:
            self._release_compiled(result.num_compiled)
        num_prefill_tokens, seconds = self._record_step(step)
        self.update_copy_costs(result.copy_report)
        events = self._kv_cache.drain_events()
        refused, self._refused = self._refused, []
        num_decodes = step.plan.num_tokens - num_prefill_tokens
        return StepOutput(step.plan.step, outputs, events, num_prefill_tokens, num_decodes, seconds, refused)

    def _confirm_sequence(self, step: _StepInFlight, index: int, result: StepResult) -> SequenceOutput | None:
        """Apply the result of one scheduled sequence. Return its output, if it has one."""
        planned, sequence = step.plan.scheduled[index], step.sequences[index]
        sequence.num_output_placeholders -= int(planned.needs_sample)
        sequence.started_at = sequence.started_at or step.started_at
        if sequence.is_finished:  # the sequence ended after this step was planned
            return None
        if index in result.failed:
            self._grammars.mark_failed(sequence)
            self._refuse_request(sequence.request.request_id, InvalidRequest(result.failed[index]))
            return None
        if planned.needs_sample:
            sequence.token_ids.append(result.token_ids[index])
        if sequence.num_preemptions == step.preemptions[index]:  # else a preemption freed the blocks
            sequence.num_computed = planned.start + planned.num_tokens
        self._input_processor.hash_full_blocks(sequence)
        if sequence.num_registered < sequence.num_computed // self.block_size:
            self.scheduler.register_blocks(sequence)
        output = SequenceOutput(sequence.request.request_id, sequence.choice, [])
        if index in result.prompt_logprobs:
            output.prompt_logprobs = sequence.take_new_prompt_logprobs(planned.start, result.prompt_logprobs[index])
        if index in result.embeddings:
            sequence.embedding = result.embeddings[index]
        if planned.needs_sample:
            self._add_token(output, sequence, index, result)
        return output if output.token_ids or output.prompt_logprobs else None

    def _confirm_drafts(
        self, step: _StepInFlight, first: int, result: StepResult, outputs: list[SequenceOutput]
    ) -> None:
        """Add the tokens that follow right draft tokens to the sequences' outputs. `first`: the index of the first
        draft token in `scheduled`."""
        assert self._drafter is not None
        output_of = {(output.request_id, output.choice): output for output in outputs}
        wrong: set[int] = set()  # slots
        for index, draft in enumerate(step.plan.drafts, first):
            sequence = step.sequences[index]
            if draft.slot in wrong or sequence.is_finished:
                continue
            is_right = sequence.token_ids[draft.position] == draft.token_id
            self._drafter.record_token(sequence, is_accepted=is_right)
            if not is_right:
                wrong.add(draft.slot)
                continue
            # From here on the row is one that was planned with a known token.
            sequence.num_scheduled += 1
            sequence.num_output_placeholders += 1
            if (more := self._confirm_sequence(step, index, result)) is not None:
                output_of[more.request_id, more.choice].extend(more)

    def _add_token(self, output: SequenceOutput, sequence: Sequence, index: int, result: StepResult) -> None:
        """Report the sequence's new token, and end the sequence if the token ends it."""
        token_id = result.token_ids[index]
        output.token_ids.append(token_id)
        if index in result.logprobs:
            output.logprobs.append(result.logprobs[index])
        self._statistics.generated_tokens += 1
        if not sequence.has_sent_output:
            sequence.fill_first_output(output, self._clock())
            self._statistics.count_prompt(sequence)
        if sequence.finish_reason_after(token_id):
            self._finish_sequence(sequence, output)

    def _finish_sequence(self, sequence: Sequence, output: SequenceOutput) -> None:
        """Write the finish reason into the sequence's last output, and free its blocks."""
        last = sequence.token_ids[-1]
        output.finish_reason = sequence.finish_reason = sequence.finish_reason_after(last)
        output.stop_token_id = last if output.finish_reason is FinishReason.STOP else None
        self._remove_sequence(sequence)

    def _release_compiled(self, num_compiled: tuple[int, ...]) -> None:
        """Queue, or refuse, the requests whose grammar every rank has compiled."""
        for grammar_id, choices in self._grammars.record_compiled(num_compiled):
            try:
                self._input_processor.check_grammar(choices[0].request, grammar_id)
            except CoatcheckError as error:
                self._refuse_request(choices[0].request.request_id, error)
            else:
                self._queue_sequences(choices)

    def _record_step(self, step: _StepInFlight) -> tuple[int, float]:
        """Record a step that has just ended. Return its number of prefill tokens and its seconds."""
        now = self._clock()
        # A pipelined step begins when the step before it ends.
        seconds = now - max(step.started_at, self._last_confirmed_at)
        self._last_confirmed_at = now
        num_prefill_tokens = sum(one.num_tokens for one in step.plan.scheduled if one.num_tokens > 1)
        self._statistics.record_step(step.plan, num_prefill_tokens, seconds, now)
        if self._drafter is not None and step.plan.scheduled and not num_prefill_tokens:
            num_drafts = len(step.plan.drafts)
            self._drafter.record_step(len(step.sequences) - num_drafts, num_drafts, seconds)
        return num_prefill_tokens, seconds

    def _refuse_request(self, request_id: str, error: CoatcheckError) -> None:
        self._refused.append((request_id, error))
        self.abort_request(request_id)

    def _remove_sequence(self, sequence: Sequence) -> None:
        self.scheduler.remove_sequence(sequence)
        self._grammars.remove_sequence(sequence)
        choices = self._sequences[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self._sequences[sequence.request.request_id]
            self._unstarted.pop(sequence.request.request_id, None)
