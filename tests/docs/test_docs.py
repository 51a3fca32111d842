"""The pages in docs/ agree with the commands, files, settings and metrics that exist."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from coatcheck.cluster.client.llm import LLMSettings
from coatcheck.cluster.client.results import GenerationChoice, GenerationResult
from coatcheck.cluster.config.derived_config import group_config, router_config
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.config.settings import default_in_words, flag_name
from coatcheck.cluster.flag_hints import SERVE_HINTS
from tests.cluster.command_line import command_of, flags_of
from tests.helm.exercised_page import exercised_page

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"(?<!`)(--[a-z-]+(?: FILE)?|coatcheck serve MODEL|[A-Z]+_HOME)(?!`)")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "bench" / "README.md"])


def test_the_api_page_is_fresh() -> None:
    """docs/api.md is what make_api.py generates from the .proto files."""
    path = ROOT / "docs" / "make_api.py"
    spec = importlib.util.spec_from_file_location("make_api", path)
    assert spec is not None and spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    assert (ROOT / "docs" / "api.md").read_text() == make_api.describe(), "run python docs/make_api.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each file that a page links to is there, and each heading within the page."""
    text = page.read_text()
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if "://" in target:
            continue
        assert not file or (page.parent / file).exists(), f"{page.name}: {target}"
        assert file or not heading or heading in headings, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_exist(page: Path) -> None:
    """Each `coatcheck COMMAND` that a page shows, in a block or in passing, exists and has the flags shown."""
    from coatcheck.cluster.cli import COMMANDS

    text = page.read_text().replace("\\\n", " ")
    lines = [line.partition(" #")[0] for line in text.splitlines() if re.match(r"\s*(\S*=\S+ )*(\$ )?coatcheck ", line)]
    shown = [*lines, *re.findall(r"`(coatcheck [^`\n]+)`", text)]
    for one in shown:
        command = one.partition("coatcheck ")[2].split()[0]
        if command in ("COMMAND", "--help", "--version"):
            continue
        assert command in COMMANDS, f"{page.name}: {one}"
        used = re.findall(r"(?<=\s)--[a-z][a-z-]*", one)
        assert set(used) <= flags_of(command), f"{page.name}: {one}"


def settings_table() -> str:
    """The rows of the table of settings, as ServeConfig gives them."""
    settings = ServeConfig.model_fields.items()
    return "".join(
        f"| `{flag_name(name)}` | {default_in_words(field)} | {field.description} |\n"
        for name, field in settings
        if not field.is_required()
    )


def test_the_settings_table_is_what_serve_takes() -> None:
    """docs/settings.md lists each setting of `coatcheck serve`, no other, with the default and text of --help."""
    table = re.search(r"\| flag \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs" / "settings.md").read_text())
    assert table is not None and table[1] == settings_table()
    help_of = {param.name: param.help for param in command_of("serve").params if hasattr(param, "help")}
    assert help_of["tp"] == "Ranks in each group: GPUs that share one copy. Default: 1."


def test_the_python_page_lists_the_settings_of_llm() -> None:
    """docs/python.md lists each setting that LLM takes, and the fields of a result that exist."""
    text = (ROOT / "docs" / "python.md").read_text()
    listed = re.search(r"`LLM` takes these settings of `coatcheck serve`[^:]*: ([^.]*)\.", text)
    assert listed is not None and re.findall(r"`(\w+)`", listed[1]) == list(LLMSettings.__annotations__)
    _, _, results = text.partition("## Results")
    assert set(re.findall(r"`result\.(\w+)`", results)) <= {*dir(GenerationResult)}
    (of_a_choice,) = re.findall(r"each of the `n` answers, with (.*?)\.\s", results, re.DOTALL)
    assert re.findall(r"`(\w+)`", of_a_choice) == [field.name for field in fields(GenerationChoice)]


def hints_table() -> str:
    """The rows of quickstart.md's table of the flags of other engines: one row per hint, with all of its flags."""
    flags_by_hint: dict[str, list[str]] = {}
    for flag, hint in SERVE_HINTS.items():
        flags_by_hint.setdefault(hint, []).append(f"`{flag}`")
    rows = [(", ".join(flags), _CODE.sub(r"`\1`", hint)) for hint, flags in flags_by_hint.items()]
    return "".join(f"| {flags} | {hint} |\n" for flags, hint in rows)


def test_the_table_of_other_engines_flags_is_what_serve_says() -> None:
    """docs/quickstart.md lists each flag of vLLM, SGLang and llama.cpp that `serve` has a hint for, with that hint."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    table = re.search(r"\| flag of vLLM, SGLang or llama.cpp \|.*\n\|[-|]+\n((?:\|.*\n)+)", page)
    assert table is not None and table[1] == hints_table()


def test_defaults_that_depend_on_the_device() -> None:
    """Without a setting, steps and KV pools have the sizes that the table gives."""
    config, settings = ServeConfig(model="some/model"), ServeConfig.model_fields
    on_cpu, on_gpu = (group_config(config, "group-0", device) for device in ("cpu", "cuda"))
    for name in ("max_batch_tokens", "kv_memory"):
        in_words = f"{getattr(on_cpu, name):g} on CPUs, {getattr(on_gpu, name):g} on GPUs"
        assert default_in_words(settings[name]) == in_words
    assert default_in_words(settings["http_port"]) == str(router_config(config, "router-0", 1).http_port)


def test_metrics_exist() -> None:
    """Each metric that a page names is on the /metrics page of the router."""
    known = set(re.findall(r"coatcheck_\w+", exercised_page()))
    for page in PAGES:
        named = set(re.findall(r"`[^`]*?(coatcheck_\w*\w)", page.read_text()))
        assert named <= known, f"{page.name}: {named - known}"
