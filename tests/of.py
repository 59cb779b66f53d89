# SPDX-License-Identifier: Apache-2.0
"""Which test files are about a file of the package: those that import it, themselves or through tests/support.

    python tests/of.py ds_mxfp8_moe/compat/zero.py    # without a name: of all files
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "unit", "kernels", "ranks", "gpu", "examples"


def imports(path: Path) -> set[str]:
    """Names that a file imports from the package and from the other tests, dotted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("ds_mxfp8_moe", "tests")}


def tests_of() -> dict[str, list[str]]:
    """From a module's name to its test files."""
    shared = {f"tests.support.{path.stem}": imports(path) for path in (ROOT / "tests" / "support").glob("*.py")}
    found = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py")):
        used = imports(path)
        for name in set().union(used, *(shared.get(name, ()) for name in used)):
            found.setdefault(name, []).append(f"{path.parent.name}/{path.stem}")
    return found


def main(asked: list[str]) -> None:
    tests = tests_of()
    for path in sorted((ROOT / "ds_mxfp8_moe").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not asked or name in asked:
            print(name)
            for test in tests.get(name.removesuffix(".py").replace("/", "."), []):
                claim = ast.get_docstring(ast.parse((ROOT / "tests" / f"{test}.py").read_text())).splitlines()[0]
                print(f"    {test}: {claim}")


if __name__ == "__main__":
    main(sys.argv[1:])
