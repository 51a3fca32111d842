"""LoadTable: the loads of all groups as candidates, and whether a group has gained room."""

import numpy as np

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, GroupStatus
from coatcheck.proto.stubs.worker_pb2 import Load, Registration
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.routing.routing_cost import Candidate, Candidates

REGISTRATION = Registration(model=GetModelResponse(block_size=16), num_blocks=100, max_num_seqs=4)
FULL = Load(status=GroupStatus(waiting=5))


def candidates(table: LoadTable, *slots: int) -> Candidates:
    """The groups in these slots, named by their slots, which hold 3, 2 and 1 tokens of the prompt."""
    tokens = [np.full(len(slots), float(number)) for number in (3, 2, 1)]
    return table.candidates(np.array([str(slot) for slot in slots], object), np.array(slots), *tokens)


def test_candidates_have_the_loads_of_their_slots() -> None:
    """Groups in any slots and any order give the same candidates as their loads one by one."""
    table = LoadTable()
    loads = {slot: GroupLoad(REGISTRATION, table, slot) for slot in (7, 0, 3)}
    for slot, load in loads.items():
        load.apply_report(Load(queued_prefill_tokens=slot, prefill_seconds=1.0), now=1.0)
        load.apply_report(Load(queued_prefill_tokens=slot, prefill_seconds=1.5, all_submissions=slot), now=2.0)
        load.add_submission(100)
        load.check()
    expected = [
        load.candidate(str(slot))._replace(device_tokens=3, host_tokens=2, expected_tokens=1)
        for slot, load in loads.items()
    ]
    seen = candidates(table, *loads)
    assert [Candidate(*row) for row in zip(*(column.tolist() for column in seen), strict=True)] == expected
    assert [expected[place].queued_prefill_tokens for place in range(3)] == [107, 100, 103]


def test_a_group_that_has_left_is_forgotten() -> None:
    """A stream that has ended clears its slot, and what is counted later changes nothing in the slot, which another
    group may have."""
    table = LoadTable()
    old = GroupLoad(REGISTRATION, table, 1)
    number = old.add_submission(50)
    old.leave_table()
    assert not table.has_room.any() and candidates(table, 1).free_tokens == [0]
    new = GroupLoad(REGISTRATION, table, 1)
    old.record_first_output(number)
    old.record_refusal()
    old.leave_table()
    assert table.has_room[1] and candidates(table, 1).queued_prefill_tokens == [0]
    new.check()


def test_only_a_group_that_had_no_room_gains_room() -> None:
    """A report of a group that had room before, or has none now, tells nothing; neither does one that is still full."""
    table = LoadTable()
    load = GroupLoad(REGISTRATION, table, 0)
    assert table.gained_room, "a new group"
    for report, gains in ((Load(), False), (FULL, False), (FULL, False), (Load(), True), (Load(), False)):
        table.gained_room = False
        load.apply_report(report, now=0.0)
        assert table.gained_room == gains
    load.record_refusal()
    assert table.is_full[0] and not table.has_room[0] and not table.gained_room
    load.apply_report(Load(), now=0.0)
    assert table.gained_room and not table.is_full[0]
