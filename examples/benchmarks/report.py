# SPDX-License-Identifier: Apache-2.0
"""Writes the pages that show result files: one for each benchmark beside them, with its plots; the README's picture;
and between their marks the README's figures, the answer of the guide to quality, and the tables of the guides to fast
training, to memory and to long context.

    make report                                      # or python examples/benchmarks/report.py
    python examples/benchmarks/report.py --check     # writes nothing; compares the files with the measures' bars
"""

import argparse
import importlib
import math
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from lib import results_file, show
from lib.gains import Gain
from lib.gains import plot as plot_gains
from training import (
    convergence,
    convergence_results,
    from_files,
    front_page,
    long_sequences,
    long_sequences_results,
    memory,
    train,
    whole_model,
    whole_model_results,
)

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
QUALITY = ROOT / "examples" / "guides" / "quality.md"
FAST = ROOT / "examples" / "guides" / "fast_training.md"
MEMORY = ROOT / "examples" / "guides" / "memory.md"
LONG = ROOT / "examples" / "guides" / "long_context.md"
OF_80_GB = ("whole_model_memory", "whole_model_80gb")  # result files of whole_model.py's cases "memory"
IN_4_BITS = "whole_model_4bits"  # of LoRA, with frozen experts in 4 bits
STUDY, OF_OPTIMIZERS = "convergence", "convergence_optimizers"  # result files of convergence.py
GAIN = results_file.RESULTS / "gain.png"
BENCHMARKS = ("training.whole_model", "training.train", "training.activations", "training.convergence",
              "training.frozen_quality", "training.merge_quality", "training.routes", "training.from_files",
              "training.long_sequences", "exchange.moe_layer", "exchange.dispatch_combine", "exchange.latency",
              "exchange.two_hops", "kernels.expert_ffn", "kernels.host", "kernels.grouped_gemm", "kernels.quantize")
Found = list[tuple[Path, dict]]


def results(benchmark: str) -> Found:
    """Its files, the latest first; of one day, that of most ranks first."""

    def when(file: tuple[Path, dict]) -> tuple:
        ranks = re.search(r"_(\d+)ranks", file[0].stem)
        return file[1]["date"][:10], int(ranks[1]) if ranks else 1

    files = [(path, results_file.read(path)) for path in sorted(results_file.RESULTS.glob("*.json"))]
    return sorted((file for file in files if file[1]["benchmark"] == benchmark), key=when, reverse=True)


def spread(result: dict) -> str:
    """How far the 10th and 90th percentiles of a row's times lie apart."""
    shares = sorted((row["p90_ms"] - row["p10_ms"]) / row["median_ms"] for row in result["rows"]
                    if row.get("median_ms") and "p90_ms" in row)
    if not shares:
        return ""
    return (f"p10 to p90 of a time: {shares[len(shares) // 2]:.1%} of the median in the middle row, "
            f"{shares[math.ceil(0.9 * len(shares)) - 1]:.1%} in nine of ten, at most {shares[-1]:.1%}.")


def page(module, found: Found) -> str:
    """All tables of a benchmark's files."""
    name = module.SHOWN.benchmark
    what = module.__doc__.split("\n\n")[0].replace("\n", " ")
    script = f"../{module.__name__.replace('.', '/')}.py"
    parts = [f"# {name}", f"{what} By [{name}.py]({script}). `make report` wrote this page. *A over B*: how many "
             "times as fast A is as B."]
    for path, result in found:
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items() if version)
        about = [f"{show.origin(result)}: [{path.name}]({path.name}), by `{result['command']}`.",
                 f"Versions: {versions}.", spread(result), result.get("note")]
        prepared = module.SHOWN.prepared(result)
        parts += [f"## {path.stem}", "\n".join(filter(None, about)), *show.texts(module.SHOWN, prepared)]
        for plot in show.plots_of(module.SHOWN, path, prepared):
            heading = plot.stem.removeprefix(path.stem).replace("_", " ")
            parts += [f"###{heading}"] * bool(heading) + [f"![{plot.stem}]({plot.name})"]
    return compact("\n\n".join(parts)) + "\n"


def of_four_ranks(found: Found) -> dict:
    return next(result for path, result in found if "_4ranks" in path.stem)


def gains(whole_models: Found, gpt_moes: Found) -> dict[str, list[Gain]]:
    """What the README's picture shows, by the titles of its parts."""
    full, adapted = front_page.whole_models(of_one_rank(whole_models)[1])
    exchanged = front_page.with_exchange(of_four_ranks(gpt_moes))
    parts = zip((full, exchanged, adapted), ("Full fine-tuning", "GPT-MoEs", "LoRA"), front_page.HOW, strict=True)
    return {f"{what} over {front_page.OVER[found[0].over]}: {how}": found for found, what, how in parts}


def front_page_text(pages: dict, quality: str) -> str:
    """The README, with its bullets, its table of models, and its own figure beside others'."""
    loaded = rows_of(result for _, result in pages[from_files])
    whole = [whole_model.SHOWN.prepared(result) for path, result in pages[whole_model] if "ranks" in path.stem]
    shown = gains(pages[whole_model], pages[train]).values()
    trainings = [result for module in (whole_model, train) for _, result in pages[module]]
    added = front_page.added_by_mxfp8(result for result in trainings if "H200" in result["machine"])
    lead = front_page.lead(*shown, loaded, added)
    text = replaced(README.read_text(), "lead", lead)
    table = compact(front_page.models_table(rows_of(trainings), whole, loaded))
    told = textwrap.fill(f"{quality} {front_page.skew(of_four_ranks(pages[train]))}", 119, break_on_hyphens=False)
    text = replaced(text, "measured", f"{table}\n\n{told}")
    by_stem = {path.stem: whole_model.SHOWN.prepared(result) for path, result in pages[whole_model]}
    own = [by_stem[stem] for stem in (of_one_rank(pages[whole_model])[0].stem, OF_80_GB[0], IN_4_BITS)]
    return replaced(text, "own", front_page.own_rates(*own))


def of_one_rank(found: Found) -> tuple[Path, dict]:
    """The latest file of one rank."""
    return next(file for file in found if "_1ranks" in file[0].stem)


def rows_of(found: Iterable[dict]) -> list[dict]:
    """The rows of result files, each with its file's machine."""
    return [{**row, "machine": result["machine"]} for result in found for row in result["rows"]]


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replaced(text: str, name: str, new: str) -> str:
    begin, end = marks(name)
    before, found, rest = text.partition(begin)
    if not found:
        sys.exit(f"the mark {begin} is missing")
    return f"{before}{begin}\n{new}\n{end}{rest.partition(end)[2]}"


def compact(text: str) -> str:
    """Markdown tables without the spaces and dashes that align them."""
    return re.sub(r"(?<=-)-{3,}(?=[:|-])", "--", re.sub(r"(?<=\S) {2,}|(?<=\|) {2,}", " ", text))


def texts() -> dict[Path, str]:
    """Every page that `make report` writes, the README, and the guides with tables."""
    modules = [importlib.import_module(name) for name in BENCHMARKS]
    pages = {module: found for module in modules if (found := results(module.SHOWN.benchmark))}
    written = {results_file.RESULTS / f"{module.SHOWN.benchmark}.md": page(module, found)
               for module, found in pages.items()}
    _, latest = of_one_rank(pages[whole_model])
    loaded = [result for _, result in pages[from_files]]
    others = [result for path, result in pages[whole_model] if path.stem in OF_80_GB]
    runs = rows_of([latest, *others, *loaded])
    steps = compact(whole_model_results.steps_text(latest))
    studies = {path.stem: convergence.SHOWN.prepared(study) for path, study in pages[convergence]}
    answer = f"{compact(convergence_results.answer(studies[STUDY]))}\n\n{origin_of(STUDY)}"
    guide = replaced(MEMORY.read_text(), "memory", compact(memory.memory_text(runs)))
    guide = replaced(guide, "bytes", compact(memory.bytes_text()))
    if OF_OPTIMIZERS in studies:
        losses = compact(convergence_results.of_optimizers(studies[OF_OPTIMIZERS]))
        guide = replaced(guide, "loss", f"{losses}\n\n{origin_of(OF_OPTIMIZERS)}")
    if long_sequences in pages:
        path, result = pages[long_sequences][0]
        table = compact(long_sequences_results.guide_text(result))
        written[LONG] = replaced(LONG.read_text(), "lengths", f"{table}\n\n{origin_of(path.stem)}")
    return written | {README: front_page_text(pages, front_page.quality(studies[STUDY])),
                      QUALITY: replaced(QUALITY.read_text(), "answer", answer),
                      FAST: replaced(FAST.read_text(), "steps", steps), MEMORY: guide}


def origin_of(stem: str) -> str:
    return f"From [{stem}.json](../benchmarks/results/{stem}.json)."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a bar is not reached")
    check = parser.parse_args(arguments).check
    missed = []
    for name in BENCHMARKS:
        shown = importlib.import_module(name).SHOWN
        for path, result in results(shown.benchmark):
            if check:
                missed += [f"{path.name}: {line}" for line in show.missed(shown, shown.prepared(result))]
            else:
                show.draw_all(shown, path, shown.prepared(result))
    if check:
        sys.exit("\n".join(missed) or 0)
    show.draw(plot_gains, GAIN, gains(results(whole_model.SHOWN.benchmark), results(train.SHOWN.benchmark)))
    for path, text in texts().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
