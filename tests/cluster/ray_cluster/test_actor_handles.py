"""The types of actor handles name methods that the actors have."""

import pytest

from coatcheck.cluster.ray_cluster.actor_handles import RankHandle, RouterHandle, SupervisorHandle
from coatcheck.cluster.supervision.supervisor import Supervisor
from coatcheck.router.actor import RouterActor
from coatcheck.workers.actor import RankActor


@pytest.mark.parametrize(
    ("handle", "actor"),
    [(SupervisorHandle, Supervisor), (RouterHandle, RouterActor), (RankHandle, RankActor)],
)
def test_every_method_of_a_handle_exists(handle: type, actor: object) -> None:
    """A call that type checkers accept reaches a method of the actor's class."""
    actor_class = actor if isinstance(actor, type) else actor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    assert [name for name in handle.__annotations__ if not callable(getattr(actor_class, name, None))] == []
