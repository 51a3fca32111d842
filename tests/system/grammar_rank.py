"""A process with one rank's engine, for grammars that might crash it: `python -m tests.system.grammar_rank DIRECTORY`.

Reads names of hostile grammars from stdin. For each, runs a request with that grammar beside one without, and prints a
line of JSON: the tokens of each, why the first was refused ("" if it was not), and the CPU seconds of both.
"""

import json
import sys
import time
from pathlib import Path

from coatcheck.workers.core.request import EngineRequest
from tests.hostile_grammars import GRAMMARS
from tests.workers.structured.structured_engine import EOS, PROMPT, engines_of, load_alone, params, write_checkpoint

TOKENS = 40


def main() -> None:
    """Until stdin ends."""
    make = engines_of(load_alone(write_checkpoint(Path(sys.argv[1]))))
    for line in sys.stdin:
        began = time.process_time()
        engine = make()
        grammar = GRAMMARS[json.loads(line)]()
        engine.submit_request(EngineRequest("free", PROMPT, params(None, ignore_eos=True, max_tokens=TOKENS)))
        engine.submit_request(
            EngineRequest("hostile", PROMPT, params(grammar, max_tokens=TOKENS, logit_bias={EOS: -100.0}))
        )
        tokens, refused = {"free": 0, "hostile": 0}, ""
        while engine.has_work:
            output = engine.step()
            engine.check()
            for part in output.outputs:
                tokens[part.request_id] += len(part.token_ids)
            for name, error in output.refused:
                refused += f"{name}: {error}"
        said = {"tokens": tokens, "refused": refused, "seconds": time.process_time() - began}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
