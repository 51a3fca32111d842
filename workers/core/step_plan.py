"""StepPlan: what a rank computes in one step, as plain integers.

Rank 0's scheduler makes the plan. Every rank, rank 0 included, applies it to its own copy of the state: a table of
token ids and a table of block numbers, with one row (a *slot*) for each running sequence. A plan has no token ids for
decodes, because the sampler writes them to the token table. Plan N + 1 can therefore be made before the tokens of step
N are known. `encode` and `decode` convert a plan to and from a flat int32 array.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple, Self

from coatcheck.proto.grammar import KINDS, Grammar
from coatcheck.proto.sampling import ReasoningLimit, SamplingParams
from coatcheck.workers.core.request import Pooling

# The sampling parameters that every rank needs. Rank 0's engine handles the others, the router handles stop strings.
_SAMPLING: Final = struct.Struct("=Q6f4i")
_SAMPLING_FIELDS: Final = (
    "seed",
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_tokens", "logprobs", "prompt_logprobs"),
)
_NONE: Final = -2  # encodes None; -1 is taken, it asks for the log-probabilities of all tokens
_BIAS: Final = struct.Struct("=if")  # token, bias


@dataclass(slots=True)
class NewSequence:
    """A sequence that gets a slot in this step. Ranks forget the sequence that had the slot before.

    `token_ids`: all known tokens, prompt and output. `prompt_len`: how many of them are the prompt.
    `stop_token_ids`: the model's and the request's end tokens, which may not be sampled before `min_tokens`; empty
    without `min_tokens`.
    `adapter`: the index in ModelSpec.adapters of the sequence's LoRA adapter, from 1; 0 without one.
    """

    slot: int
    choice: int
    prompt_len: int
    token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    grammar_id: int | None = None
    pooling: Pooling = Pooling.NONE
    adapter: int = 0


class ScheduledSequence(NamedTuple):
    """Compute `num_tokens` tokens of a slot from position `start` on; if `needs_sample`, also sample the next token."""

    slot: int
    start: int
    num_tokens: int
    needs_sample: bool


class DraftToken(NamedTuple):
    """`token_id` is the guess of the token at `position` of a slot (see workers/engine/drafter.py)."""

    slot: int
    position: int
    token_id: int


class TableWrite(NamedTuple):
    """An entry of the ranks' block tables that changes: block_tables[slot][block_index] = block."""

    slot: int
    block_index: int
    block: int


@dataclass(slots=True)
class StepPlan:
    """One step.

    Ranks apply the fields in this order: demotes, restores, new sequences, table writes, cow_copies, state_restores,
    drafts; then they compute all scheduled tokens in one forward pass, and apply state_saves. They report the progress
    of demotes and restores (see CopyReport). They compile the grammars in other threads, and report how many are
    compiled (see GrammarCompiler).
    """

    step: int = 0
    new_sequences: list[NewSequence] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)
    cow_copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write: (source block, target block)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    # Guessed tokens. The last entries of `scheduled` compute them, one entry for each, in the same order.
    drafts: list[DraftToken] = field(default_factory=list)
    demotes: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    restores: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    state_restores: list[tuple[int, int]] = field(default_factory=list)  # (snapshot's slot, sequence's slot)
    state_saves: list[tuple[int, int]] = field(default_factory=list)  # (sequence's slot, snapshot's slot)
    dropped_grammars: list[int] = field(default_factory=list)  # ids
    new_grammars: list[Grammar] = field(default_factory=list)  # to compile; ids count up from 0 since the start
    stop: bool = False  # the group ends after this step

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(one.num_tokens for one in self.scheduled)

    @property
    def is_idle(self) -> bool:
        """Whether the plan has nothing but table writes."""
        work = self.scheduled, self.new_sequences, self.demotes, self.restores, self.dropped_grammars, self.new_grammars
        return not any(work)

    def encode(self) -> "array[int]":
        """The plan as int32. `decode` is the inverse."""
        out = array("i", (self.step, int(self.stop), len(self.new_sequences), len(self.new_grammars)))
        for new in self.new_sequences:
            grammar_id = -1 if new.grammar_id is None else new.grammar_id
            out.extend((new.slot, new.choice, new.prompt_len, grammar_id, new.pooling.value, new.adapter))
            _append_list(out, new.token_ids)
            _append_list(out, new.stop_token_ids)
            _encode_sampling(out, new.sampling)
        for grammar in self.new_grammars:
            _append_list(out, _encode_grammar(grammar))
        for tuples in (
            *(self.table_writes, self.cow_copies, self.scheduled, self.demotes, self.restores),
            *(self.state_restores, self.state_saves, self.drafts),
        ):
            _append_list(out, list(chain.from_iterable(tuples)))
        _append_list(out, self.dropped_grammars)
        return out

    @classmethod
    def decode(cls, ints: "array[int]") -> Self:
        reader = _Reader(ints)
        step, stop, num_new, num_grammars = reader.read_ints(4)
        return cls(
            step=step,
            stop=bool(stop),
            new_sequences=[_decode_new_sequence(reader) for _ in range(num_new)],
            new_grammars=[_decode_grammar(reader.read_list()) for _ in range(num_grammars)],
            table_writes=[TableWrite(*write) for write in reader.read_tuples(3)],
            cow_copies=[(source, target) for source, target in reader.read_tuples(2)],
            scheduled=[
                ScheduledSequence(slot, start, num_tokens, bool(needs_sample))
                for slot, start, num_tokens, needs_sample in reader.read_tuples(4)
            ],
            demotes=[(block, host_block) for block, host_block in reader.read_tuples(2)],
            restores=[(host_block, block) for host_block, block in reader.read_tuples(2)],
            state_restores=[(source, target) for source, target in reader.read_tuples(2)],
            state_saves=[(source, target) for source, target in reader.read_tuples(2)],
            drafts=[DraftToken(*draft) for draft in reader.read_tuples(3)],
            dropped_grammars=reader.read_list().tolist(),
        )


def _append_list(out: "array[int]", values: Sequence[int]) -> None:
    out.append(len(values))
    out.extend(values)


@dataclass(slots=True)
class _Reader:
    """Reads an encoded plan from its start to its end."""

    ints: "array[int]"
    at: int = 0

    def read_ints(self, count: int) -> "array[int]":
        self.at += count
        return self.ints[self.at - count : self.at]

    def read_list(self) -> "array[int]":
        return self.read_ints(*self.read_ints(1))

    def read_tuples(self, size: int) -> Iterator[tuple[int, ...]]:
        values = iter(self.read_list())
        return zip(*[values] * size, strict=True)


def _decode_new_sequence(reader: _Reader) -> NewSequence:
    slot, choice, prompt_len, grammar_id, pooling, adapter = reader.read_ints(6)
    ids, stops = reader.read_list().tolist(), tuple(reader.read_list())
    grammar = None if grammar_id < 0 else grammar_id
    sampling = _decode_sampling(reader)
    return NewSequence(slot, choice, prompt_len, ids, sampling, stops, grammar, Pooling(pooling), adapter)


def _encode_sampling(out: "array[int]", params: SamplingParams) -> None:
    seed, *others = (getattr(params, name) for name in _SAMPLING_FIELDS)
    content = _SAMPLING.pack(seed or 0, *(_NONE if value is None else value for value in others))
    _append_list(out, array("i", content + b"".join(_BIAS.pack(*bias) for bias in params.logit_bias.items())))
    _append_list(out, params.allowed_token_ids)
    _append_list(out, params.logprob_token_ids)
    out.append(len(params.bad_token_ids))
    for sequence in params.bad_token_ids:
        _append_list(out, sequence)
    limit = params.reasoning_limit
    _append_list(out, limit.end_token_ids if limit is not None else ())
    if limit is not None:
        out.append(limit.max_tokens)
        _append_list(out, limit.start_token_ids)


def _decode_sampling(reader: _Reader) -> SamplingParams:
    content = reader.read_list().tobytes()
    fields = dict(zip(_SAMPLING_FIELDS, _SAMPLING.unpack_from(content), strict=True))
    for name in ("logprobs", "prompt_logprobs"):
        fields[name] = None if fields[name] == _NONE else fields[name]
    allowed = tuple(reader.read_list())
    named = tuple(reader.read_list())
    (num_bad,) = reader.read_ints(1)
    bad = tuple(tuple(reader.read_list()) for _ in range(num_bad))
    limit = None
    if end := tuple(reader.read_list()):
        (max_tokens,) = reader.read_ints(1)
        limit = ReasoningLimit(max_tokens, tuple(reader.read_list()), end)
    return SamplingParams(
        **fields,
        logit_bias=dict(_BIAS.iter_unpack(content[_SAMPLING.size :])),
        allowed_token_ids=allowed,
        logprob_token_ids=named,
        bad_token_ids=bad,
        reasoning_limit=limit,
    )


def _encode_grammar(grammar: Grammar) -> "array[int]":
    """[kind, bytes of the text, bytes of the prefix], then both texts as UTF-8, padded to whole int32."""
    text, prefix = grammar.text.encode(), grammar.prefix.encode()
    content = text + prefix
    return array("i", (KINDS.index(grammar.kind), len(text), len(prefix))) + array(
        "i", content + bytes(-len(content) % 4)
    )


def _decode_grammar(ints: "array[int]") -> Grammar:
    kind, text, prefix = ints[:3]
    content = ints[3:].tobytes()
    return Grammar(KINDS[kind], content[:text].decode(), content[text : text + prefix].decode())
