"""FakeRunner: takes the place of the ranks' model, and fails on a wrong plan.

It keeps the same mirror as a rank, but a slot of its pool holds the (token, position, hash of all before) that was
stored there. Each row reads back its whole context through its block table and fails if anything but its own tokens
lies there. Draft tokens are a row's own while the step is computed. The token it "samples" is a hash of that context,
so a wrong block also changes what comes out. Its host memory is a second such pool; what is restored arrives as late as
`delay` says, as on a GPU, and until then the block holds nothing that anybody may read. With `keeps_states` each slot
also has a state, the tokens before: a row that does not start at 0 fails unless its slot has the state of its own
tokens.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coatcheck.workers.core.model_spec import LayerSpec, ModelSpec
from coatcheck.workers.core.runner_protocol import CopyReport, CopyStatus, StepResult
from coatcheck.workers.core.step_plan import StepPlan

SPEC = ModelSpec(
    name="fake",
    architecture="Fake",
    vocab_size=1000,
    max_model_len=4096,
    dtype="float32",
    fingerprint="fake",
    eos_token_ids=(0,),
    layers=(LayerSpec(1, 1, 16),),
    tp=1,
    num_weights=1 << 19,
    weight_bytes=1 << 20,
)


def next_token(context: list[int], choice: int, seed: int = 0) -> int:
    """The fake model's token after `context`: 0 (end of sequence) one time in 61."""
    value = zlib.crc32(repr((context, choice, seed)).encode())
    return 0 if value % 61 == 0 else 1 + value % 999


def answer(prompt: list[int], max_tokens: int, choice: int = 0, seed: int = 0) -> list[int]:
    """All tokens that the fake model generates after a prompt."""
    said: list[int] = []
    while len(said) < max_tokens and (not said or said[-1] != 0):
        said.append(next_token(prompt + said, choice, seed))
    return said


@dataclass
class FakeStep:
    """A LaunchedStep that was computed when it was launched, as on a CPU."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass
class FakeCopy:
    """A copy that is under way for `steps_left` more steps; `host_block` and `block` are those of a restore."""

    steps_left: int
    host_block: int = -1
    block: int = -1


class FakeRunner:
    """`pool[block][offset]` is the context up to and with the token stored there, or None.

    `delay()` is how many steps the next copy takes beyond its own; a restore of a host block in `broken` fails. Copies
    take `seconds` a block, or so they say when one has ended.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        delay: Callable[[], int] = lambda: 0,
        keeps_states: bool = False,
    ) -> None:
        self.block_size = block_size
        self.host: dict[int, list[tuple[int, ...] | None]] = {}
        self.broken: set[int] = set()
        self.seconds = {"demote": 1e-6, "restore": 1e-6}
        self._measured = dict(self.seconds)
        self.restored = self.demoted = 0
        self._delay = delay
        self._copies: deque[FakeCopy] = deque()
        self.pool: list[list[tuple[int, ...] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.rows: dict[int, tuple[int, int, int]] = {}  # slot -> prompt_len, choice, seed
        self.states: dict[int, tuple[int, ...]] | None = {} if keeps_states else None
        self.plans = 0
        self.computed = 0

    def launch(self, plan: StepPlan) -> FakeStep:
        """Carry out the plan, encoded and decoded as between ranks."""
        plan = StepPlan.decode(plan.encode())
        self.plans += 1
        for block, host_block in plan.demotes:
            assert not any(copy.host_block == host_block for copy in self._copies), (
                "a host block is overwritten while it is read"
            )
            self.host[host_block] = list(self.pool[block])
            self.broken.discard(host_block)
            self.demoted += 1
            self._copies.append(FakeCopy(self._delay()))
        for host_block, block in plan.restores:
            assert not any(copy.block == block for copy in self._copies), "two restores into one block"
            self.pool[block] = [None] * self.block_size
            self._copies.append(FakeCopy(self._delay(), host_block, block))
        for new in plan.new_sequences:
            self.tokens[new.slot] = list(new.token_ids)
            self.tables[new.slot] = {}
            self.rows[new.slot] = (new.prompt_len, new.choice, new.sampling.seed or 0)
        for write in plan.table_writes:
            self.tables[write.slot][write.block_index] = write.block
        for source, target in plan.cow_copies:
            self.pool[target] = list(self.pool[source])
        self._copy_states(plan.state_restores)
        sampled = []
        slots = [row.slot for row in plan.scheduled[: len(plan.scheduled) - len(plan.drafts)]]
        assert len(set(slots)) == len(slots), "a slot has two rows"
        texts = {slot: list(self.tokens[slot]) for slot in slots}  # with the drafts
        for row, draft in zip(plan.scheduled[len(slots) :], plan.drafts, strict=True):
            assert (row.slot, row.start, row.num_tokens, row.needs_sample) == (draft.slot, draft.position, 1, True)
            assert len(texts[draft.slot]) == draft.position, "a draft token leaves a gap"
            texts[draft.slot].append(draft.token_id)
        for row in plan.scheduled:  # every row's keys are stored before any row attends
            tokens, table = texts[row.slot], self.tables[row.slot]
            for position in range(row.start, row.start + row.num_tokens):
                block = table[position // self.block_size]
                assert not any(copy.block == block for copy in self._copies), "written while a restore is under way"
                self.pool[block][position % self.block_size] = tuple(tokens[: position + 1])
            self.computed += row.num_tokens
        for index, row in enumerate(plan.scheduled):
            tokens, table = texts[row.slot], self.tables[row.slot]
            end = row.start + row.num_tokens
            for position in range(end):
                there = self.pool[table[position // self.block_size]][position % self.block_size]
                assert there == tuple(tokens[: position + 1]), f"slot {row.slot} reads another's KV at {position}"
            token = -1
            if row.needs_sample:
                _, choice, seed = self.rows[row.slot]
                token = next_token(tokens[:end], choice, seed)
                known = self.tokens[row.slot]
                assert index >= len(slots) or len(known) == end, "sampled before its last token"
                if known == tokens[:end]:  # else a draft token was wrong
                    known.append(token)
            sampled.append(token)
            if self.states is not None:
                state = self.states.get(row.slot) if row.start else ()
                assert state == tuple(tokens[: row.start]), f"slot {row.slot} starts from another's state"
                self.states[row.slot] = tuple(tokens[:end])
        self._copy_states(plan.state_saves)
        return FakeStep(StepResult(sampled, copy_report=self._report()))

    def _copy_states(self, pairs: list[tuple[int, int]]) -> None:
        targets = {target for _, target in pairs}
        assert len(targets) == len(pairs), "two states are copied to one slot"
        assert not targets & {source for source, _ in pairs}, "a slot is source and target"
        for source, target in pairs:
            assert self.states is not None, "the model has no states"
            self.states[target] = self.states[source]

    def _report(self) -> CopyReport | None:
        statuses = []
        for copy in self._copies:
            copy.steps_left -= 1
            statuses.append(CopyStatus.IN_PROGRESS if copy.steps_left >= 0 else self._finish(copy))
        self._copies = deque(copy for copy in self._copies if copy.steps_left >= 0)
        return CopyReport(tuple(statuses), *self._measured.values()) if statuses else None

    def _finish(self, copy: FakeCopy) -> CopyStatus:
        direction = "demote" if copy.block < 0 else "restore"
        self._measured[direction] = self.seconds[direction]
        if copy.block < 0:
            return CopyStatus.DONE
        self.restored += 1
        if copy.host_block in self.broken:
            return CopyStatus.CORRUPT
        self.pool[copy.block] = list(self.host[copy.host_block])
        return CopyStatus.DONE
