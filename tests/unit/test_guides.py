# SPDX-License-Identifier: Apache-2.0
"""The guides say what the code says: errors, config keys, figures, sections in JSON."""

import ast
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from ds_mxfp8_moe.config import MXFP8MoEConfig, parse
from ds_mxfp8_moe.engine import metrics
from ds_mxfp8_moe.engine.advice import about_expert_parallel

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / ".github").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def strings_of_the_package() -> str:
    """Every string constant of the package, one a line. The values inside f-strings are left out."""
    found = []
    for path in [*(ROOT / "ds_mxfp8_moe").rglob("*.py"), *(ROOT / "ops").rglob("*.py")]:
        found += [node.value for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


def test_the_errors_that_troubleshooting_quotes_exist():
    """Texts of this package are bold; those of DeepSpeed and torch are not."""
    page = " ".join((ROOT / "examples/guides/troubleshooting.md").read_text().split())
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", page)
    strings = strings_of_the_package()
    assert len(quoted) >= 20
    assert not [piece for quote in quoted for piece in quote.split("...") if piece.strip() not in strings]


# ---- config.md ------------------------------------------------------------------------------------------------------


def keys_on_the_page() -> dict[str, tuple[str, str]]:
    """Key -> its values and its default, as config.md has them."""
    text = (ROOT / "examples/guides/config.md").read_text()
    return {key: (values, default) for key, values, default in
            re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", text, re.MULTILINE)}


def literals(annotation: Any) -> list:
    """The values of a Literal, alone or in a union."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in literals(part)]


def test_config_md_has_every_key_with_its_default_and_its_values():
    page, fields = keys_on_the_page(), MXFP8MoEConfig.model_fields
    assert page.keys() == fields.keys()
    for key, field in fields.items():
        values, default = page[key]
        choices = [True, False] if field.annotation is bool else literals(field.annotation)
        if choices:
            assert sorted(values.split(", ")) == sorted(f"`{json.dumps(value)}`" for value in choices), key
        if field.default is None:
            assert default in ("none", "chosen", "estimated", "by device", "by machine", "`host`"), key
        else:
            assert json.loads(default.strip("`")) == json.loads(json.dumps(field.default)), key
        bounds = [getattr(bound, name) for bound in field.metadata for name in ("ge", "gt") if hasattr(bound, name)]
        assert all(str(bound) in values for bound in bounds), key


def test_metrics_md_has_every_figure():
    page = (ROOT / "examples/guides/metrics.md").read_text()
    table = "".join(line for line in page.splitlines() if line.startswith("| `")).split("|")
    named = {name for cell in table[1::4] for name in re.findall(r"`(\w+)`", cell)}
    loads, sample, times = [4, 3, 4, 3], [0, 8, 4, 1, 0, 1, 0.1], [2, 2, 1]
    assert named == set(metrics.figures_of([*loads, *sample, *times], [1, 2], 2)) and len(named) >= 9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sections_in_json_are_valid(page):
    """Each "mxfp8_moe" in a JSON block of the pages."""
    for block in re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL):
        config = json.loads(re.sub(r": N\b", ": 2", block if block.startswith("{") else f"{{{block}}}"))
        parse(config)
        assert not about_expert_parallel(config, ranks=2)


def guides() -> set[str]:
    return {page.name for page in (ROOT / "examples/guides").glob("*.md")}


def test_the_front_page_is_short_and_the_index_leads_to_every_guide():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100 and "examples/guides/README.md" in text
    index = (ROOT / "examples/guides/README.md").read_text()
    assert guides() - {"README.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        path, _, anchor = link.partition("#")
        if not link.startswith(("http", "../blob")):
            target = (page.parent / path) if path else page
            assert target.exists(), link
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-")
                                            for one in headings}, link


def test_internals_names_files_that_exist():
    text = (ROOT / "examples/guides/internals.md").read_text()
    for name in re.findall(r"`([\w/]+(?:\.py|\.cuh|\.yaml|/))`", text):
        assert any((ROOT / folder / name).exists() for folder in ("", "ds_mxfp8_moe", "examples/benchmarks")), name
