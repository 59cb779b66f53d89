# SPDX-License-Identifier: Apache-2.0
"""The guides quote what the code says: each error in the troubleshooting page is one that the package raises."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def strings_of_the_package() -> str:
    """Every string constant of ds_mxfp8_moe, one a line. The values inside f-strings are left out."""
    found = []
    for path in (ROOT / "ds_mxfp8_moe").rglob("*.py"):
        found += [node.value for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


def test_the_errors_that_troubleshooting_quotes_exist():
    page = (ROOT / "examples/guides/troubleshooting.md").read_text()
    section = page.split("## Errors of this package\n")[1].split("\n## ")[0]
    causes = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    quoted = [quote for cause in causes for quote in re.findall("`([^`]+)`", cause)]
    strings = strings_of_the_package()
    assert len(quoted) >= 10
    assert not [piece for quote in quoted for piece in quote.split("...") if piece.strip() not in strings]
