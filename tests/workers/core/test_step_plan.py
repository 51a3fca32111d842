"""The plan on the wire."""

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import ReasoningLimit, SamplingParams
from coatcheck.workers.core.request import Pooling
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite

grammars = st.builds(
    Grammar, st.sampled_from(["json_schema", "regex", "grammar"]), st.text(min_size=1).filter(str.strip), st.text()
)
ints = st.integers(0, 2**31 - 1)
floats32 = st.floats(0, 2, width=32)
sampling = st.builds(
    SamplingParams,
    temperature=floats32,
    top_k=ints,
    top_p=st.floats(0.125, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    presence_penalty=floats32,
    frequency_penalty=floats32,
    repetition_penalty=st.floats(0.125, 2, width=32),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(-1, 20),
    prompt_logprobs=st.none() | st.integers(-1, 20),
    logit_bias=st.dictionaries(ints, floats32, max_size=3),
)
sampling |= st.builds(SamplingParams, min_tokens=st.integers(0, 9), seed=ints)
token_ids = st.lists(ints, min_size=1, max_size=3).map(tuple)
limits = st.builds(ReasoningLimit, ints, st.just(()) | token_ids, token_ids)
sampling |= st.builds(SamplingParams, seed=ints, allowed_token_ids=token_ids, reasoning_limit=st.none() | limits)
sampling |= st.builds(
    SamplingParams, seed=ints, logprobs=st.integers(-1, 20), logprob_token_ids=st.lists(ints, max_size=5).map(tuple)
)
sampling |= st.builds(SamplingParams, seed=ints, bad_token_ids=st.lists(token_ids, max_size=3).map(tuple))
plans = st.builds(
    StepPlan,
    step=ints,
    new_sequences=st.lists(
        st.builds(
            NewSequence,
            ints,
            ints,
            ints,
            st.lists(ints, max_size=5),
            sampling,
            st.tuples(ints),
            st.none() | ints,
            st.sampled_from(Pooling),
        ),
        max_size=3,
    ),
    table_writes=st.lists(st.builds(TableWrite, ints, ints, ints), max_size=4),
    cow_copies=st.lists(st.tuples(ints, ints), max_size=3),
    scheduled=st.lists(st.builds(ScheduledSequence, ints, ints, ints, st.booleans()), max_size=4),
    demotes=st.lists(st.tuples(ints, ints), max_size=3),
    restores=st.lists(st.tuples(ints, ints), max_size=3),
    state_restores=st.lists(st.tuples(ints, ints), max_size=3),
    state_saves=st.lists(st.tuples(ints, ints), max_size=3),
    dropped_grammars=st.lists(ints, max_size=2),
    new_grammars=st.lists(grammars, max_size=2),
    stop=st.booleans(),
)


@given(plans)
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    """Every rank decodes exactly what rank 0 encoded."""
    assert StepPlan.decode(plan.encode()) == plan
