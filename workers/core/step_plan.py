"""StepPlan: what a rank computes in one step, as plain integers.

Rank 0's scheduler makes the plan. Every rank, rank 0 included, applies it to its own copy of the state: a table of
token ids and a table of block numbers, with one row (a *slot*) for each running sequence. A plan has no token ids for
decodes, because the sampler writes them to the token table. Plan N + 1 can therefore be made before the tokens of step
N are known. `encode` and `decode` convert a plan to and from a flat int32 array.
"""

import struct
from array import array
from dataclasses import dataclass, field
from typing import Self

from coatcheck.proto.grammar import KINDS, Grammar
from coatcheck.proto.sampling import SamplingParams

_HEADER = 10


@dataclass(slots=True)
class NewRow:
    """A sequence gets a slot.

    `stop_token_ids`: the model's and the request's end tokens, which may not be sampled before `min_tokens`.
    """

    slot: int
    choice: int
    prompt_len: int
    token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    grammar_id: int | None = None


@dataclass(slots=True)
class Row:
    """Compute `num_tokens` tokens of a slot from position `start` on. `sample`: draw a token after the last one."""

    slot: int
    start: int
    num_tokens: int
    sample: bool


@dataclass(slots=True)
class TableWrite:
    """block_tables[slot][index] = block."""

    slot: int
    index: int
    block: int


@dataclass(slots=True)
class StepPlan:
    """One step.

    Ranks apply the fields in this order: demotes, restores, new rows, table writes, copies; then they compute all rows
    in one forward pass. They report the progress of demotes and restores (see CopyReport) and of grammars, which they
    compile beside the steps (see GrammarCompiler).
    """

    step: int = 0
    new_rows: list[NewRow] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write: (source block, target block)
    rows: list[Row] = field(default_factory=list)
    demotes: list[tuple[int, int]] = field(default_factory=list)  # (device block, host slot)
    restores: list[tuple[int, int]] = field(default_factory=list)  # (host slot, device block)
    dropped_grammars: list[int] = field(default_factory=list)  # ids
    new_grammars: list[Grammar] = field(default_factory=list)  # to compile; ids count up from 0 since the start
    stop: bool = False  # the group ends after this step

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do but table writes."""
        work = self.rows, self.new_rows, self.demotes, self.restores, self.dropped_grammars, self.new_grammars
        return not any(work)

    def encode(self) -> "array[int]":
        """The plan as int32. `decode` is the inverse."""
        out = array("i", (self.step, int(self.stop), len(self.new_rows), len(self.table_writes), len(self.copies)))
        out.extend(
            (len(self.rows), len(self.demotes), len(self.restores), len(self.dropped_grammars), len(self.new_grammars))
        )
        for new in self.new_rows:
            params = _encode_sampling(new.sampling)
            out.extend((new.slot, new.choice, new.prompt_len, len(new.token_ids), len(new.stop_token_ids), len(params)))
            out.append(-1 if new.grammar_id is None else new.grammar_id)
            out.extend(new.token_ids)
            out.extend(new.stop_token_ids)
            out.extend(params)
        for write in self.table_writes:
            out.extend((write.slot, write.index, write.block))
        for pair in (*self.copies, *self.demotes, *self.restores):
            out.extend(pair)
        for row in self.rows:
            out.extend((row.slot, row.start, row.num_tokens, int(row.sample)))
        out.extend(self.dropped_grammars)
        for new_grammar in self.new_grammars:
            encoded = _encode_grammar(new_grammar)
            out.append(len(encoded))
            out.extend(encoded)
        return out

    @classmethod
    def decode(cls, ints: "array[int]") -> Self:
        step, stop, num_new, num_writes, num_copies, num_rows = ints[:6]
        num_demotes, num_restores, num_dropped, num_new_grammars = ints[6:_HEADER]
        at = _HEADER
        new_rows = []
        for _ in range(num_new):
            slot, choice, prompt_len, num_ids, num_stops, num_params, grammar_id = ints[at : at + 7]
            ids_end = at + 7 + num_ids
            stops_end = ids_end + num_stops
            ids, stops = ints[at + 7 : ids_end].tolist(), tuple(ints[ids_end:stops_end])
            at = stops_end + num_params
            sampling = _decode_sampling(ints[stops_end:at])
            new = NewRow(slot, choice, prompt_len, ids, sampling, stops)
            new.grammar_id = grammar_id if grammar_id >= 0 else None
            new_rows.append(new)
        writes = [TableWrite(*ints[i : i + 3]) for i in range(at, at + 3 * num_writes, 3)]
        at += 3 * num_writes
        pairs = [(ints[i], ints[i + 1]) for i in range(at, at + 2 * (num_copies + num_demotes + num_restores), 2)]
        copies, pairs = pairs[:num_copies], pairs[num_copies:]
        at += 2 * (num_copies + num_demotes + num_restores)
        rows = [Row(ints[i], ints[i + 1], ints[i + 2], bool(ints[i + 3])) for i in range(at, at + 4 * num_rows, 4)]
        at += 4 * num_rows
        dropped_grammars = list(ints[at : at + num_dropped])
        at += num_dropped
        new_grammars = []
        for _ in range(num_new_grammars):
            new_grammars.append(_decode_grammar(ints[at + 1 : at + 1 + ints[at]]))
            at += 1 + ints[at]
        demotes, restores = pairs[:num_demotes], pairs[num_demotes:]
        return cls(step, new_rows, writes, copies, rows, demotes, restores, dropped_grammars, new_grammars, bool(stop))


def _bits(*values: float) -> "array[int]":
    return array("i", struct.pack(f"={len(values)}f", *values))


def _encode_sampling(params: SamplingParams) -> "array[int]":
    # Only what changes the draw. Rank 0 handles n, max_tokens and ignore_eos, the router stop strings. Grammars may be
    # long, so each is sent once, in `new_grammars`.
    out = array("i", struct.pack("=Q", params.seed or 0))
    out.extend(_bits(params.temperature, params.top_p, params.min_p))
    out.extend(_bits(params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    out.append(params.top_k)
    out.append(params.min_tokens)
    out.append(-1 if params.logprobs is None else params.logprobs)
    out.append(-1 if params.prompt_logprobs is None else params.prompt_logprobs)
    for token, bias in params.logit_bias.items():
        out.append(token)
        out.extend(_bits(bias))
    return out


def _encode_grammar(grammar: Grammar) -> "array[int]":
    """Kind, number of bytes, and the bytes padded to int32."""
    text = grammar.text.encode()
    out = array("i", (KINDS.index(grammar.kind), len(text)))
    out.frombytes(text + bytes(-len(text) % 4))
    return out


def _decode_grammar(ints: "array[int]") -> Grammar:
    kind, length = ints[:2]
    return Grammar(KINDS[kind], ints[2:].tobytes()[:length].decode())


def _decode_sampling(ints: "array[int]") -> SamplingParams:
    (seed,) = struct.unpack("=Q", ints[:2].tobytes())
    temperature, top_p, min_p, repetition, presence, frequency = struct.unpack("=6f", ints[2:8].tobytes())
    top_k, min_tokens, logprobs, prompt_logprobs = ints[8:12]
    biases = {ints[i]: struct.unpack("=f", ints[i + 1 : i + 2].tobytes())[0] for i in range(12, len(ints), 2)}
    return SamplingParams(
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=biases,
        seed=seed,
        logprobs=None if logprobs < 0 else logprobs,
        prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
    )
