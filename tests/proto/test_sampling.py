"""The bounds and the defaults of SamplingParams, and its wire form."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import MAX_BYTES, Grammar
from coatcheck.proto.sampling import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGPROB_IDS,
    MAX_LOGPROBS,
    MAX_STOPS,
    ReasoningLimit,
    SamplingParams,
)
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage
from coatcheck.proto.stubs.coatcheck_pb2 import StructuredOutput

NAN, INFINITY = math.nan, math.inf
BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INFINITY),
    ("temperature", 100.5),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", NAN),
    ("repetition_penalty", INFINITY),
    ("presence_penalty", 2.1),
    ("presence_penalty", NAN),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", NAN),
    ("logit_bias", {3: NAN}),
    ("logit_bias", {3: INFINITY}),
    ("logit_bias", {3: -1001.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("seed", -1),
    ("seed", 2**64),
    ("n", 0),
    ("n", -1),
    ("n", MAX_CHOICES + 1),
    ("logprobs", -2),
    ("logprobs", 2**31),
    ("prompt_logprobs", -2),
    ("logprob_token_ids", tuple(range(MAX_LOGPROB_IDS + 1))),
    ("stop", ("",)),
    ("stop", ("a",) * (MAX_STOPS + 1)),
    ("stop_token_ids", tuple(range(257))),
    ("bad_words", (" ",)),
    ("bad_words", ("a",) * (MAX_BAD_WORDS + 1)),
    ("bad_words", ("a" * 1025,)),
    ("bad_token_ids", ((),)),
    ("bad_token_ids", (tuple(range(65)),)),
    ("bad_token_ids", ((1,),) * (2 * MAX_BAD_WORDS + 1)),
    ("allowed_token_ids", tuple(range((1 << 18) + 1))),
    ("max_reasoning_tokens", -1),
]
EDGES: list[tuple[str, Any]] = [
    ("max_tokens", 1),
    ("temperature", 0.0),
    ("temperature", 100.0),
    ("top_k", 0),
    ("top_p", 1.0),
    ("top_p", 1e-6),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("repetition_penalty", 100.0),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("logit_bias", {0: -1000.0, 1: 1000.0}),
    ("seed", 0),
    ("seed", 2**64 - 1),
    ("n", MAX_CHOICES),
    ("logprobs", 0),
    ("prompt_logprobs", MAX_LOGPROBS),
    ("stop", ("a",) * MAX_STOPS),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_names_its_field(name: str, value: Any) -> None:
    """A value outside its bounds is refused with a message that begins with the field's name."""
    with pytest.raises(InvalidRequest, match=rf"^{name}\b.* (must be|the maximum is) "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), EDGES)
def test_bounds_are_inclusive(name: str, value: Any) -> None:
    """The values on each bound are accepted as they are."""
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_stays_within_max_tokens() -> None:
    """min_tokens above max_tokens is refused."""
    with pytest.raises(InvalidRequest, match=r"^min_tokens is 5; it must be at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_unset_fields_take_our_defaults() -> None:
    """The fields of an empty message have our defaults, not the zeros of proto3."""
    assert SamplingParams.from_message(SamplingMessage()) == SamplingParams()
    assert SamplingParams().temperature == 1.0
    assert SamplingParams().skip_special_tokens


def test_zeros_that_are_set_are_kept() -> None:
    """A scalar that is set to zero differs from an unset one."""
    params = SamplingParams.from_message(SamplingMessage(temperature=0.0, skip_special_tokens=False, logprobs=0))
    assert (params.temperature, params.skip_special_tokens, params.logprobs) == (0.0, False, 0)


@pytest.mark.parametrize("field", ["max_tokens", "n", "top_p", "repetition_penalty"])
def test_zeros_that_are_wrong_are_refused_on_the_wire(field: str) -> None:
    """A zero sent on purpose is refused where zero is out of bounds."""
    set_to_zero: dict[str, Any] = {field: 0}
    with pytest.raises(InvalidRequest, match=f"^{field} is 0"):
        SamplingParams.from_message(SamplingMessage(**set_to_zero))


floats = st.floats(0.0, 1.0, width=32)
valid = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31),
    temperature=floats,
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(2**-20, 1.0, width=32),
    min_p=floats,
    repetition_penalty=st.floats(0.5, 2.0, width=32),
    presence_penalty=st.floats(-2.0, 2.0, width=32),
    frequency_penalty=st.floats(-2.0, 2.0, width=32),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-1000, 1000, width=32), max_size=5),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=MAX_STOPS).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    ignore_eos=st.booleans(),
    n=st.integers(1, MAX_CHOICES),
    logprobs=st.none() | st.integers(-1, 2**31 - 1),
    prompt_logprobs=st.none() | st.integers(-1, 2**31 - 1),
    skip_special_tokens=st.booleans(),
    include_stop=st.booleans(),
)
valid |= st.builds(
    SamplingParams,
    logprobs=st.integers(-1, MAX_LOGPROBS),
    logprob_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=MAX_LOGPROB_IDS).map(tuple),
)
texts = st.text(min_size=1, max_size=9).filter(str.strip)
structured = st.builds(
    SamplingParams,
    structured=st.builds(Grammar, st.sampled_from(["json_schema", "regex", "grammar"]), texts)
    | st.builds(Grammar.of_choices, st.lists(texts, min_size=1, max_size=4)),
)


ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)
masked = st.builds(SamplingParams, allowed_token_ids=ids) | st.builds(
    SamplingParams,
    bad_words=st.lists(texts, max_size=3).map(tuple),
    bad_token_ids=st.lists(ids, max_size=3).map(tuple),
    max_reasoning_tokens=st.none() | st.integers(0, 2**31 - 1),
    reasoning_limit=st.none() | st.builds(ReasoningLimit, st.integers(0, 2**31 - 1), st.just(()) | ids, ids),
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"allowed_token_ids": (1,)}, {"bad_words": ("a",)}),
        ({"allowed_token_ids": (1,)}, {"bad_token_ids": ((1,),)}),
        ({"allowed_token_ids": (1,)}, {"min_tokens": 1}),
        ({"allowed_token_ids": (1,)}, {"structured": Grammar("regex", "a")}),
        ({"structured": Grammar("regex", "a")}, {"bad_words": ("a",)}),
        ({"structured": Grammar("regex", "a")}, {"bad_token_ids": ((1,),)}),
    ],
)
def test_masks_that_could_forbid_every_token_together_are_refused(first: Any, second: Any) -> None:
    """Each of two such fields is taken alone, and both together are refused."""
    SamplingParams(**first)
    SamplingParams(**second)
    with pytest.raises(InvalidRequest, match="does not go with .*; remove one of them"):
        SamplingParams(**first, **second)


def test_a_reasoning_limit_needs_its_end_marker() -> None:
    """A limit without an end marker, or with one of too many tokens, is refused."""
    with pytest.raises(InvalidRequest, match=r"^reasoning_limit.end_token_ids is empty; it must be at least one"):
        ReasoningLimit(5, (), ())
    with pytest.raises(InvalidRequest, match=r"^reasoning_limit.end_token_ids has 65 ids; the maximum is 64"):
        ReasoningLimit(5, (), tuple(range(65)))


@given(valid | structured | masked)
def test_wire_form_keeps_everything(params: SamplingParams) -> None:
    """The wire form of parameters gives equal parameters."""
    assert SamplingParams.from_message(SamplingMessage.FromString(params.to_message().SerializeToString())) == params


@given(st.binary(max_size=64))
def test_any_message_is_taken_or_refused(data: bytes) -> None:
    """Any bytes that parse as a message give parameters or InvalidRequest, and no other error."""
    message = SamplingMessage()
    try:
        message.ParseFromString(data)
    except Exception:
        return  # not a message at all: gRPC refuses it before us
    try:
        params = SamplingParams.from_message(message)
    except InvalidRequest as error:
        assert "must be" in str(error)
    else:
        assert SamplingParams.from_message(params.to_message()) == params


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_token_ids_must_be_the_models(field: str) -> None:
    """A token id that the model does not have is refused, naming the field and the limit."""
    good: Any
    bad: Any
    good, bad = ((7,), (8,)) if field == "stop_token_ids" else ({7: 1.0}, {8: 1.0})
    SamplingParams(**{field: good}).check_model(vocab_size=8)
    with pytest.raises(InvalidRequest, match=f"^{field} entry is 8; it must be a token id below 8"):
        SamplingParams(**{field: bad}).check_model(vocab_size=8)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (StructuredOutput(), "names no kind"),
        (StructuredOutput(regex=""), "structured.regex is empty"),
        (StructuredOutput(grammar="x" * (MAX_BYTES + 1)), "structured.grammar has more than"),
    ],
)
def test_structured_output_must_be_one_that_can_be(message: StructuredOutput, words: str) -> None:
    """A missing, empty or too long grammar is refused by name; so are min_tokens and ignore_eos beside a grammar."""
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams.from_message(SamplingMessage(structured=message))
    for name in ("min_tokens", "ignore_eos"):
        with pytest.raises(InvalidRequest, match=f"^{name} is .*; it must be unset"):
            SamplingParams(structured=Grammar("regex", "a"), **{name: 1})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "line 1 column 2"),
        (Grammar("json_schema", "[1]"), ""),
        (Grammar("json_schema", '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar("json_schema", "[" * 5000), ""),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1/x.json"}'), ""),
        (Grammar("regex", "(?=a)"), "look-around"),
        (Grammar("grammar", "start: other"), 'unknown name: "other"'),
        (Grammar("grammar", "root ::= ("), ""),
    ],
)
def test_what_does_not_compile_says_why(grammar: Grammar, words: str) -> None:
    """The error for a grammar that does not compile has the message of the compiler and what to change."""
    with pytest.raises(InvalidRequest, match=f"structured.{grammar.kind} cannot be compiled: .*") as refused:
        grammar.check_compiles()
    assert words in str(refused.value)
