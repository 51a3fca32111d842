"""Starts real rank processes over gloo and collects what each one returns.

A fork server imports torch and transformers once for all of them: that is most of a rank's start.
"""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.workers.distributed.communicator import Communicator

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.workers.host.preloaded_rank"])  # as rank_group.py: one server for both

Work = Callable[[Communicator, Any], Any]


def free_address() -> str:
    """An address with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_ranks(
    size: int,
    work: Work,
    argument: Any,
    *,
    seconds: float = MAX_WAIT_SECONDS,
    timeout_seconds: float = MAX_WAIT_SECONDS,
    share_memory: bool = True,
) -> list[Any]:
    """`work(communicator, argument)` on every rank of a new group, in rank order. Raises with a rank's traceback.

    Answers are plain Python values: a tensor's memory would go with the rank that sent it.
    """
    address = free_address()
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _context.Process(
            target=_rank,
            args=(rank, size, address, timeout_seconds, share_memory, work, argument, pipes[rank][1]),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        answers = []
        for rank, (receiver, sender) in enumerate(pipes):
            sender.close()
            if not receiver.poll(seconds):
                raise TimeoutError(f"rank {rank} of {size} did not answer in {seconds} s")
            answers.append(receiver.recv())
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    for rank, (failure, _) in enumerate(answers):
        if failure:
            raise AssertionError(f"rank {rank} of {size} failed:\n{failure}")
    return [value for _, value in answers]


def _rank(
    rank: int,
    size: int,
    address: str,
    timeout_seconds: float,
    share_memory: bool,
    work: Work,
    argument: Any,
    answer: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        cpu = torch.device("cpu")
        communicator = Communicator.join(
            rank, size, address, device=cpu, timeout_seconds=timeout_seconds, share_memory=share_memory
        )
        value = work(communicator, argument)
        communicator.close()
        answer.send((None, value))
    except Exception:
        answer.send((traceback.format_exc(), None))
