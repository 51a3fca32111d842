"""Where the states of a prompt are saved."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.snapshot_points import MIN_SNAPSHOT_TOKENS, choose_snapshot_points

choose = partial(choose_snapshot_points, block_size=4, num_choices=1)


def test_a_prompt_saves_its_states_where_it_branches_off_and_near_its_end() -> None:
    """The last 4 tokens may be those of a chat template, which the next turn does not repeat."""
    assert choose(0, 0, prompt_len=103, num_tokens=103) == [24]
    assert choose(0, 0, prompt_len=104, num_tokens=104) == [25]
    assert choose(0, 20, prompt_len=200, num_tokens=200) == [20, 49]
    assert choose(0, 30, prompt_len=124, num_tokens=124) == [30], "the KV of the whole prompt is cached"


def test_fewer_than_64_tokens_are_computed_again() -> None:
    """No snapshot is saved there: a step of its own costs more than these tokens."""
    assert choose(0, 0, prompt_len=67, num_tokens=67) == []
    assert choose(0, 0, prompt_len=68, num_tokens=68) == [16]
    assert choose(10, 20, prompt_len=200, num_tokens=200) == [49], "40 tokens to where the prompt branches off"
    assert choose(0, 20, prompt_len=120, num_tokens=120) == [20], "36 tokens from there to the end"


def test_the_other_choices_start_near_the_end_of_the_prompt() -> None:
    """However short the prompt is, and however much of the answer another group has delivered."""
    assert choose(0, 0, prompt_len=9, num_tokens=9, num_choices=2) == [1]
    assert choose(0, 0, prompt_len=7, num_tokens=7, num_choices=2) == []
    assert choose(0, 0, prompt_len=40, num_tokens=120, num_choices=2) == [9, 29]
    assert choose(0, 0, prompt_len=40, num_tokens=120) == [29], "a request with one choice"
    assert choose(9, 9, prompt_len=40, num_tokens=80, num_choices=2) == [], "40 tokens of one choice alone"


@given(
    start=st.integers(0, 60),
    num_known=st.integers(0, 60),
    prompt_len=st.integers(1, 300),
    num_outputs=st.integers(0, 200),
    block_size=st.sampled_from([1, 4, 16, 64, 128]),
    num_choices=st.integers(1, 3),
)
def test_every_point_is_a_block_of_the_sequence_and_worth_its_step(
    start: int, num_known: int, prompt_len: int, num_outputs: int, block_size: int, num_choices: int
) -> None:
    """At least one token is left to compute after the last point. At most one point, that of a prompt with choices, is
    less than 64 tokens after the one before."""
    points = choose_snapshot_points(
        start,
        num_known,
        prompt_len=prompt_len,
        num_tokens=prompt_len + num_outputs,
        block_size=block_size,
        num_choices=num_choices,
    )
    distances = [(end - begin) * block_size for begin, end in zip([start, *points], points, strict=False)]
    assert all(distance >= block_size for distance in distances)
    assert all(point * block_size < prompt_len + num_outputs for point in points)
    assert sum(distance < MIN_SNAPSHOT_TOKENS for distance in distances) <= (num_choices > 1)
