# SPDX-License-Identifier: Apache-2.0
"""Modules of ds_mxfp8_moe and ops import downwards only, and never in a circle. Imports inside functions count."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ds_mxfp8_moe"
# The floors of the house, from low to high: folders of the package, and the one file that all of them read. What lies
# beside them is the top floor. A module imports modules of its own floor and of those below.
FLOORS = ["ops", "config", "compute", "transport", "compat", "ffn", "recognition", "routing", "layers",
          "checkpoint", "engine"]


def sources() -> dict[str, Path]:
    """The file of each module, by its name within the package; "__init__" is the package itself."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, ()), (ROOT / "ops", ("ops", ))):
        for path in folder.rglob("*.py"):
            inner = path.relative_to(folder)
            if inner.parts[0] != "ops":  # the link to the folder that is read anyway
                parts = [*prefix, *inner.with_suffix("").parts]
                found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imports(path: Path, module: str) -> set[str]:
    """Absolute names of all that a file imports, as far down as they are written."""
    package = [PACKAGE, *(part for part in module.split(".") if part != "__init__")]
    if path.name != "__init__.py":
        package.pop()
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def graph() -> dict[str, set[str]]:
    """For each module the modules of the package that it imports."""
    files, found = sources(), {}
    for module, path in files.items():
        inside = [name.removeprefix(PACKAGE).lstrip(".") for name in imports(path, module)
                  if f"{name}.".startswith(f"{PACKAGE}.")]
        # What is imported from a module need not be a module itself.
        targets = {name if name in files else name.rpartition(".")[0] or "__init__" for name in inside}
        found[module] = targets - {module}
    return found


def floor_of(module: str) -> int:
    folder = module.split(".")[0]
    return FLOORS.index(folder) if folder in FLOORS else len(FLOORS)


def circle(found: dict[str, set[str]]) -> str:
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


def test_imports_go_down():
    found = graph()
    assert "compute.casts" in found["compute.grouped_gemm"]
    assert "ops.triton_kernels.quantize" in found["compute.casts"]  # inside a function
    upward = [f"{module} imports {target}" for module, targets in found.items() for target in targets
              if floor_of(target) > floor_of(module)]
    assert not upward
    assert not circle(found)
    knows_deepspeed = [module for module, path in sources().items() if module.split(".")[0] == "ops"
                       and not module.startswith("ops.op_builder")
                       and any(name.split(".")[0] == "deepspeed" for name in imports(path, module))]
    assert not knows_deepspeed


def test_folders_are_the_floors():
    folders = {path.name for path in (ROOT / PACKAGE).iterdir() if (path / "__init__.py").exists()}
    assert folders - {"hook"} == set(FLOORS) - {"config"}  # the hook installs as a package of its own
