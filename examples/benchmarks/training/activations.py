# SPDX-License-Identifier: Apache-2.0
"""What a decoder layer keeps from forward to backward, tensor by tensor.

It sees what autograd saves in a forward of whole_model.py's training, without checkpointing and without CUDA graphs,
whose memory autograd does not see. Each piece of memory counts once, for the module that saves it first. Parameters
and weights in MXFP8 are left out: they are no activations. Rows are of the model's last layer.

    python examples/benchmarks/training/activations.py
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib import models, run, show
from lib.show import Measure
from lib.world import on_gpu
from training import changes
from training.whole_model import AUTOEP, DEFAULT, FULL, Case, Training

CASES: dict[str, dict] = {"tiny": {"model": "tiny", "sequence": 128},
                          "short": {"model": "Qwen3-30B-A3B", "sequence": 4096}}
LAYERS = 2
PART = re.compile(r"\blayers\.(\d+)\.?(.*)$")


def kept(model: nn.Module, batch: torch.Tensor) -> dict[tuple[str, str, str], int]:
    """Bytes by the part of the last layer that saves them, shape and dtype."""
    inside, found, seen = [""], {}, {p.untyped_storage().data_ptr() for p in model.parameters()}
    names = {module: name for name, module in model.named_modules()}

    def left(*_: object) -> None:
        inside.pop()

    hooks = [hook for module in names for hook in (
        module.register_forward_pre_hook(lambda module, _: inside.append(names[module])),
        module.register_forward_hook(left))]

    def save(x: torch.Tensor) -> torch.Tensor:
        memory, part = x.untyped_storage(), PART.search(inside[-1])
        if memory.data_ptr() not in seen and part and int(part[1]) == LAYERS - 1:
            key = part[2] or "the layer itself", "x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")
            found[key] = found.get(key, 0) + memory.nbytes()
        seen.add(memory.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss = model(input_ids=batch, labels=batch).loss
    for hook in hooks:
        hook.remove()
    loss.backward()
    return found


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    liger = on_gpu()
    case = Case(training=FULL, one_rank_of=8 if on_gpu() else 2, sequences=1, micro_batches=1, layers=LAYERS, ranks=1,
                liger=liger, loss=changes.LARGE_CHUNKS if liger else None, **CASES[args.cases])
    for contender in (AUTOEP, DEFAULT):
        training = Training(case, contender, 1, graphs=False)
        training.step()
        found = kept(training.engine.module, training.batches[0])
        yield [{"case": case.described() | {"part": part, "shape": shape, "dtype": dtype}, "contender": contender,
                "mib": round(nbytes / 2**20, 3), "correct": nbytes > 0}
               for (part, shape, dtype), nbytes in sorted(found.items(), key=lambda one: -one[1])]
        models.free(training.engine)


def sentences(result: dict) -> list[str]:
    totals: dict[str, float] = {}
    for row in result["rows"]:
        totals[row["contender"]] = totals.get(row["contender"], 0) + row["mib"]
    return [f"{name} keeps {total:.1f} MiB for a layer." for name, total in totals.items()]


def plot(result: dict, pyplot) -> None:
    rows = [row for row in result["rows"] if row["contender"] == DEFAULT][::-1]
    pyplot.barh([f"{row['case']['part']} {row['case']['shape']} {row['case']['dtype']}" for row in rows],
                [row["mib"] for row in rows])
    pyplot.xlabel("MiB of a layer")


SHOWN = show.Shown("activations", [Measure("MiB of a tensor that is kept", (DEFAULT, ), figure="mib",
                                           better=show.SMALLER, form="{:.1f}")],
                   [("MiB", "mib", "{:.1f}")], plot, wide=False, sentences=sentences)


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--cases", choices=CASES, default="short" if on_gpu() else "tiny")
    run.main(SHOWN, parser, rows, alone=True)


if __name__ == "__main__":
    main()
