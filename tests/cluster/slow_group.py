"""A group in a process that tests can suspend: the real engine and service over a fake runner with timed steps.

`python -m tests.cluster.slow_group NAME` prints the address where it listens. Its model is FakeRunner's.
"""

import sys
import time

from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService
from tests.workers.fake_runner import SPEC, FakeRunner, FakeStep

_BLOCKS, _BLOCK_SIZE = 256, 16


class TimedRunner(FakeRunner):
    """A step takes 4 ms, and 20 µs for each of its tokens."""

    def launch(self, plan: StepPlan) -> FakeStep:
        if plan.scheduled:
            time.sleep(0.004 + 2e-5 * plan.num_tokens)
        return super().launch(plan)


def main(name: str) -> None:
    """Serve until killed."""
    engine = Engine(SPEC, TimedRunner(_BLOCKS, _BLOCK_SIZE), num_blocks=_BLOCKS, block_size=_BLOCK_SIZE)
    model = public.GetModelResponse(
        name="tiny", max_model_len=512, vocab_size=SPEC.vocab_size, block_size=_BLOCK_SIZE, dtype="float32",
        kv_dtype="float32", fingerprint=SPEC.fingerprint, eos_token_ids=SPEC.eos_token_ids,
    )  # fmt: skip
    registration = wire.Registration(
        group=name, epoch=name, model=model, num_blocks=_BLOCKS, tp=1, contract=CONTRACT, version=VERSION
    )
    service = WorkerService(GroupReport(registration, [public.RankStatus(rank=0, healthy=True)]))
    loop = EngineLoop(engine, on_step=service.publish, on_death=lambda error: sys.exit(str(error)))
    print(service.start(loop, "127.0.0.1:0"), flush=True)
    loop.run()


if __name__ == "__main__":
    main(sys.argv[1])
