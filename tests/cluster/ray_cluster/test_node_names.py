"""What nodes are called."""

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.cluster.ray_cluster.node_names import node_names


def test_a_name_that_others_have_too_comes_with_a_bit_of_the_id() -> None:
    """Six digits tell them apart; more where they must, as for ids that somebody has chosen."""
    assert node_names({"0" * 9: "a", "1" * 9: "b", "2" * 9: "b"}) == {
        "0" * 9: "a",
        "1" * 9: "b (111111)",
        "2" * 9: "b (222222)",
    }
    assert node_names({"fffffff00": "a", "fffffff01": "a"}) == {
        "fffffff00": "a (fffffff00)",
        "fffffff01": "a (fffffff01)",
    }
    assert node_names({}) == {}


@given(
    st.dictionaries(
        st.text("0f", min_size=12, max_size=12), st.sampled_from(["127.0.0.1", "gpu-1", "gpu-2"]), max_size=9
    )
)
def test_no_two_nodes_are_called_alike(names: dict[str, str]) -> None:
    """Every node has a name, which begins with its own, and no other node has it: what is counted by name is counted
    once."""
    told = node_names(names)
    assert told.keys() == names.keys() and len(set(told.values())) == len(names)
    assert all(told[id].startswith(name) for id, name in names.items())
