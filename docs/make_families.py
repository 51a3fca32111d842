"""Writes the list of model families in docs/models.md from tests/workers/model/families.json.

    python docs/make_families.py              the page, from the file
    python docs/make_families.py --measure    the file too: serves a tiny random model of every causal type

A type is served if its logits equal those of transformers in four cases (coatcheck/workers/verification), and otherwise
refused with the reason that `coatcheck serve` gives.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
FILE = ROOT / "tests" / "workers" / "model" / "families.json"
BEGIN, END = "<!-- families: written by docs/make_families.py -->\n", "<!-- families end -->\n"

# What the file has for a type that is not refused. A wrong or crashed model must be mended, not documented.
REFUSED_AS = {"equal": "", "no reference": "transformers does not compute a small model of it"}
# (a pattern of the refusal, the row's reason, what to do), in the order of the table.
REASONS = (
    (
        r"convolution over|delayed state",
        "a convolution or a recurrent state over tokens",
        "choose a model with attention in every layer, or a [hybrid](#hybrid-models) of another type",
    ),
    (
        r"outside of transformers' attention interface|through transformers' attention interface",
        "attention, or a state, outside of transformers' attention interface",
        "try a newer transformers: models with attention are served once their code uses the interface",
    ),
    (
        r"keys must be as long as queries|latent attention is served for",
        "values longer than keys, or latent attention (MLA) that the code of this project does not know",
        "choose another model; `coatcheck plan` sizes latent attention",
    ),
    (
        r"takes indices|adds a bias|keys for|calls attention more than once",
        "sparse attention, several attentions in a layer, or a bias on the scores",
        "choose another model",
    ),
    (
        r"neither causal nor|depends on more than positions",
        "a mask that is neither causal nor a sliding window",
        "choose another model",
    ),
    (
        r"is multimodal",
        "takes more than text, and its text model is not served",
        "choose a type of [this list](#multimodal-checkpoints)",
    ),
    (
        r"encoder-decoder|does not initialise position_ids",
        "an encoder, or an encoder-decoder",
        "choose a decoder-only model",
    ),
    (
        r"",
        "transformers builds no small model of it, or its code does not take several requests in one pass",
        "`coatcheck verify MODEL` prints the reason for a config.json",
    ),
)


def reason_of(refusal: str) -> int:
    """The index in REASONS of a refusal's row."""
    return next(index for index, (pattern, _, _) in enumerate(REASONS) if re.search(pattern, refusal))


def families_section(found: dict[str, Any]) -> str:
    """The page's section for the content of families.json."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    served = [name for name, refusal in found["types"].items() if not refusal and name not in TESTED_MODEL_TYPES]
    refused = {name: refusal for name, refusal in found["types"].items() if refusal}
    release, date = found["transformers"], found["date"]
    yield f"For a tiny random model of each of these types the logits equalled those of transformers {release} on"
    yield f"{date} (`--tp 1`; in one step, in chunks, beside another sequence and on a cached prefix):"
    yield ""
    yield from _wrap(served)
    yield ""
    yield "These types have a causal language model in transformers and are refused:"
    yield ""
    yield "| reason | types | what to do |"
    yield "|---|---|---|"
    for index, (_, reason, advice) in enumerate(REASONS):
        if names := [name for name, refusal in refused.items() if reason_of(refusal) == index]:
            yield f"| {reason} | {' '.join(f'`{name}`' for name in names)} | {advice} |"


def _wrap(names: list[str]) -> Iterator[str]:
    line = ""
    for name in names:
        if len(line) + len(name) + 3 > 120:
            yield line
            line = ""
        line += f" `{name}`" if line else f"`{name}`"
    yield line


def measure() -> dict[str, Any]:
    """The content of families.json for the installed transformers, of every type that it has a causal model of.

    Multimodal types are not in it: tests/workers/model/test_text_towers.py compares them.
    """
    import torch

    from tests.workers.architecture_sweep import MODEL_TYPES, configs_of, verdict_on

    torch.set_num_threads(1)  # many times faster for tiny models on a busy machine
    types: dict[str, str] = {}
    for model_type in sorted(MODEL_TYPES):
        plain = next(configs_of(model_type), None)
        if plain is None:
            types[model_type] = "transformers builds no small model of it"
        else:
            with tempfile.TemporaryDirectory() as directory:
                verdict = verdict_on(*plain, Path(directory))
            types[model_type] = verdict.detail if verdict.outcome == "refused" else REFUSED_AS[verdict.outcome]
        print(f"{len(types)}/{len(MODEL_TYPES)} {model_type}: {types[model_type][:100] or 'served'}", file=sys.stderr)
    return {
        "transformers": metadata.version("transformers"),
        "date": datetime.date.today().isoformat(),
        "types": types,
    }


def main() -> None:
    """Write the page, with --measure the file too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="serve every type, and write the file")
    if parser.parse_args().measure:
        FILE.write_text(json.dumps(measure(), indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + families_section(json.loads(FILE.read_text())) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
