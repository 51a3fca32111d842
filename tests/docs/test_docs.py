"""What docs/ says is what is there."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


def test_the_api_page_is_fresh() -> None:
    """Making it again from the protos gives what is committed."""
    path = ROOT / "docs" / "make_api.py"
    spec = importlib.util.spec_from_file_location("make_api", path)
    assert spec is not None and spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    assert (ROOT / "docs" / "api.md").read_text() == make_api.describe(), "run python docs/make_api.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    """Each flag of `coatcheck serve` that a page's commands use is one that it has."""
    from coatcheck.cluster.config import ServeConfig

    known = {f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields} | {"--config", "--help"}
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if line.strip().startswith("coatcheck serve "):
            used = re.findall(r"(?<=\s)--[a-z-]+", line.partition("#")[0])
            assert set(used) <= known, f"{page.name}: {line.strip()}"


def test_metrics_exist() -> None:
    """Each metric that a page names is on the router's own page, under just that name."""
    from tests.helm.test_monitoring import page as metrics

    known = set(re.findall(r"coatcheck_\w+", metrics()))
    for page in PAGES:
        named = set(re.findall(r"`[^`]*?(coatcheck_\w*\w)", page.read_text()))
        assert named <= known, f"{page.name}: {named - known}"
