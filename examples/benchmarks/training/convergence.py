# SPDX-License-Identifier: Apache-2.0
"""Does MXFP8 cost quality? Whole trainings in pairs: each recipe beside bf16, seed by seed.

Runs of one seed have the same initial weights, batches and random draws (convergence_run.py). The result is the mean
of the paired differences of held-out loss, with a 95 % interval. Training amplifies every difference of rounding. The
yardstick is therefore bf16 against "reordered": bf16 with another order of sums. examples/guides/quality.md explains
the method.

    python examples/benchmarks/training/convergence.py --sizes 50M --sharing 8 --seconds 540
    python examples/benchmarks/training/convergence.py --hf_model FOLDER --ds_config FILE --data FOLDER --out ab.json

The first command trains for so many seconds, the most important runs first, as many side by side as --sharing says,
and shows what is finished. A run that does not finish in time is lost. --known FILE takes the finished runs of a
result file as they are, so that the study goes on in pieces, also on other machines. Runs share the machine, so their
speed says nothing. The second command compares a user's section "mxfp8_moe" with bf16, on their model and data.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

from arguments import one_or_more
from finetune import free_port
from lib import paired, results_file, run, show
from lib.paired import Interval
from lib.show import Measure
from training import convergence_run
from training.convergence_run import BF16, OWN, RECIPES, ROOT, SIZES, YARDSTICK, Recipe, Run

MAIN = (BF16, "default_128", YARDSTICK, "mxfp8_128")
FURTHER = ("default_32", "wires_128", "classic_bf16", "classic_default_128")
# Seeds of each recipe.
STUDY = {"50M": dict.fromkeys(MAIN, 8) | dict.fromkeys(FURTHER, 3), "300M": dict.fromkeys(MAIN, 4),
         "tiny": dict.fromkeys(MAIN, 2), OWN: dict.fromkeys((BF16, OWN, YARDSTICK), 3)}
SAME_START = 5e-4  # of the loss: MXFP8 changes it less than another seed does
LIMIT = 0.0025  # what MXFP8 may cost, as a share of the loss
CURVES = ("loss", "grad_norm", "busiest_expert", "heldout_loss", "heldout_loss_bf16", "sqnr_db", "shrinkage")
MOST_DB = 60  # that a plot shows: re-scaling is nearly exact
ENDING_S = 20  # of the budget, for tables and plots
SHORTEST_S = 60  # a run is not started for less, before the time of one is known
STARTED = time.time()


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = run.parser(__doc__)
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "convergence",
                        help="folder of tokens and logs, outside of the repository (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=540, help="for this piece with its start")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["50M", "300M"])
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", help="default: the study's. There are also plain, "
                        "mxfp8_32, and recipes with one rounding changed, such as default_128-h. An unknown name "
                        "lists all")
    parser.add_argument("--seeds", type=one_or_more, help="of each recipe (default: as many as the study has)")
    parser.add_argument("--steps", type=one_or_more, default=1000)
    parser.add_argument("--log_every", type=one_or_more, default=10, help="steps")
    parser.add_argument("--heldout_every", type=one_or_more, default=100, help="steps")
    parser.add_argument("--heldout_windows", type=one_or_more, default=128)
    parser.add_argument("--data", default="installed", help="stdlib, pydoc, installed, or a folder of texts")
    parser.add_argument("--ranks", type=one_or_more, default=1, help="of a run, which its experts are spread over. "
                        "They share a GPU if there are fewer GPUs")
    parser.add_argument("--sharing", type=one_or_more, default=1, help="runs that share a GPU")
    parser.add_argument("--known", type=Path, metavar="FILE", help="a result file whose runs are not run again; they "
                        "stand in the new file too, which is then called as old as that one")
    own = parser.add_argument_group("a model of your own")
    own.add_argument("--ds_config", type=Path, metavar="FILE", help='your DeepSpeed config with its section '
                     '"mxfp8_moe": it is compared with the same in bf16')
    own.add_argument("--hf_model", metavar="NAME_OR_PATH", help="a Hugging Face model, its folder, or a YAML config")
    own.add_argument("--model", type=Path, help="sizes of the GPT of examples/gpt_moe, instead of --hf_model")
    own.add_argument("--seq_len", type=one_or_more, help="tokens of a sequence")
    parser.add_argument("--rank_of", nargs=3, help=argparse.SUPPRESS)  # this process is a rank of that run
    args = run.parse(parser, arguments, ("rank_of", ))
    args.arguments = sys.argv[1:] if arguments is None else arguments
    if args.show or args.rank_of:
        return args
    if ROOT in (args.state.resolve(), *args.state.resolve().parents):
        parser.error("--state: name a folder outside of the repository")
    if args.heldout_every % args.log_every:
        parser.error("--heldout_every must be a multiple of --log_every")
    if args.ds_config:
        if not args.ds_config.is_file():
            parser.error(f"--ds_config: there is no file {args.ds_config}")
        if (args.hf_model is None) == (args.model is None):
            parser.error("--ds_config: name your model by either --hf_model or --model")
        convergence_run.own_config(args.ds_config)
        args.sizes = [OWN]
    elif args.hf_model or args.model:
        parser.error("--hf_model and --model need --ds_config: a DeepSpeed config with your section \"mxfp8_moe\"")
    valid = STUDY[OWN] if args.ds_config else RECIPES
    if unknown := [name for name in args.recipes or () if name not in valid]:
        parser.error(f"--recipes: unknown {', '.join(unknown)}; expected some of {', '.join(valid)}")
    for size in args.sizes:
        if size != OWN and SIZES[size].sequences % args.ranks:
            parser.error(f"--ranks {args.ranks}: expected a divisor of the {SIZES[size].sequences} sequences of a "
                         f"step of {size}")
    return args


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs, the most important ones first: seed by seed, and the recipes of MAIN before others."""
    runs = []
    for size in args.sizes:
        seeds = dict.fromkeys(args.recipes, args.seeds or STUDY[size][BF16]) if args.recipes else STUDY[size]
        if args.seeds:
            seeds = dict.fromkeys(seeds, args.seeds)
        found = [Run(size, recipe, seed) for seed in range(max(seeds.values())) for recipe in seeds
                 if seed < seeds[recipe]]
        runs += sorted(found, key=lambda one: one.recipe not in (*MAIN, OWN))  # keeps the order within both parts
    return runs


# ---- all runs -----------------------------------------------------------------------------------------------------


def places(args: argparse.Namespace) -> list[str | None]:
    """The GPUs of each run that there is room for, as CUDA_VISIBLE_DEVICES has them; None for a place on CPUs."""
    if get_accelerator().device_name() == "cpu":
        return [None] * args.sharing
    count = get_accelerator().device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    each = min(args.ranks, count) if count else sys.exit("there is no GPU")
    return [",".join(visible[i:i + each]) for i in range(0, count - each + 1, each)] * args.sharing


def launch(run: Run, place: str | None, args: argparse.Namespace) -> subprocess.Popen:
    """Starts the ranks of one run, which write into its folder."""
    folder = args.state / run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)  # of a run with other arguments
    threads = max(1, (os.cpu_count() or 1) // (len(places(args)) * args.ranks))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | (
        {"CUDA_VISIBLE_DEVICES": place} if place else {"DS_ACCELERATOR": "cpu"})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--master-addr",
               "127.0.0.1", "--master-port", str(free_port()), __file__, *args.arguments, "--rank_of", *map(str, run)]
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                start_new_session=True)


def end(processes: Iterable[subprocess.Popen]) -> None:
    """Ends the launchers of runs and their ranks, within ten seconds."""
    processes = list(processes)
    for process in processes:
        process.terminate()  # torchrun ends its ranks
    deadline = time.monotonic() + 10
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own
            process.wait()


def asked(args: argparse.Namespace) -> dict:
    """What a case must agree in with the arguments."""
    return {"steps": args.steps, "ranks": args.ranks, "heldout_windows": args.heldout_windows,
            "data_sha256": json.loads((args.state / "tokens.json").read_text())["sha256"][:16]}


def finished(run: Run, args: argparse.Namespace) -> bool:
    """Whether --state has this run from its start to its end, with these arguments."""
    path = args.state / run.name / "summary.json"
    if not path.exists():
        return False
    summary = json.loads(path.read_text())
    return (asked(args).items() <= summary["case"].items()
            and summary["section"] == convergence_run.recipe_of(run, args).section)


def say(line: str) -> None:
    print(f"{time.time() - STARTED:5.0f} s  {line}", file=sys.stderr, flush=True)


def known_rows(args: argparse.Namespace) -> tuple[dict[Run, dict], str | None]:
    """The rows of --known by their runs, and its commit. Exits if they are of other runs than asked for."""
    if args.known is None:
        return {}, None
    result = results_file.read(args.known, "convergence")
    found = {Run(one["case"]["size"], one["contender"], one["case"]["seed"]): one for one in result["rows"]}
    planned = set(plan(args))
    for one, known in found.items():
        given = {key: known["case"].get(key) for key in asked(args)}
        if given != asked(args):
            sys.exit(f"--known {args.known} has runs of {given}, and these are of {asked(args)}: leave it out")
        if one in planned and known.get("section") != (section := convergence_run.recipe_of(one, args).section):
            sys.exit(f"--known {args.known} has {one.name} with the section {known.get('section')}, and it is "
                     f"{section} now: leave it out")
    return found, result["commit"]


def work(runs: Iterable[Run], args: argparse.Namespace, store: Callable[[], None]) -> bool:
    """Runs what is not finished until this process is args.seconds old. Calls `store` whenever a run has finished.

    A run is started if as much time is left as the longest one of its size took here.

    Returns:
        Whether no run failed.
    """
    until = STARTED + args.seconds - ENDING_S
    waiting = [one for one in runs if not finished(one, args)]
    free, running, took, good = places(args), {}, {}, True
    while True:
        for one in list(waiting):
            needed = took.get(one.size, SHORTEST_S)
            if not free or time.time() + needed > until:
                continue
            place = free.pop(0)
            waiting.remove(one)
            say(f"{one.name} on {place or 'the CPU'}")
            running[one] = place, launch(one, place, args), time.time()
        if not running:
            break
        if time.time() > until:
            end(process for _, process, _ in running.values())
            say(f"no time to finish {', '.join(one.name for one in running)}")
            break
        time.sleep(0.2)
        for one, (place, process, begin) in list(running.items()):
            if process.poll() is None:
                continue
            if process.returncode or not finished(one, args):
                good = False
                output = (args.state / one.name / "output.txt").read_text()
                say(f"{one.name} failed with {process.returncode}:\n{output[-3000:]}")
            else:
                took[one.size] = max(took.get(one.size, 0.0), time.time() - begin)
                say(f"{one.name}: finished")
                store()
            del running[one]
            free.append(place)
    if waiting:
        say(f"no time for {len(waiting)} runs, beginning with {waiting[0].name}: "
            f"--seconds {args.seconds:.0f} leaves less than a run takes")
    return good


def row(folder: Path) -> dict:
    """The result row of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curves: dict = {name: {str(entry["step"]): _short(entry[name]) for entry in log if name in entry}
                    for name in CURVES}
    heldout = list(curves["heldout_loss"].values())
    times = [(entry["step"], entry["seconds"]) for entry in log if "seconds" in entry]
    per_step = [(after - before) / (done - begun) for (begun, before), (done, after) in pairwise(times)]
    quantizes = summary["contender"] == OWN or (
        summary["contender"] in RECIPES and RECIPES[summary["contender"]].quantizes)
    expected = 0 if summary["contender"] == "plain" else summary["moe_layers"]
    failure = ("the loss is not finite" if not math.isfinite(log[-1]["loss"]) else
               "the held-out loss did not fall" if heldout[-1] >= heldout[0] else
               f"{summary['layers_converted']} of {expected} layers were converted"
               if summary["layers_converted"] != expected else
               "no rounding acted" if quantizes and not summary["roundings"] else
               "a rounding acted" if summary["roundings"] and not quantizes else None)
    return {**summary, "step_ms": round(1e3 * median(per_step), 1) if per_step else None,
            "heldout_loss": heldout[-1], "curves": curves, "correct": failure is None} | (
        {"failure": failure} if failure else {})


def _short(value: float | dict) -> float | dict:
    """Six digits: differences are hundredths of a per cent."""
    return {key: _short(one) for key, one in value.items()} if isinstance(value, dict) else float(f"{value:.6g}")


# ---- differences in pairs -------------------------------------------------------------------------------------------


def base_of(contender: str) -> str:
    return RECIPES.get(contender, Recipe()).base


def differences(found: dict[int, dict], bases: dict[int, dict], step: str | None = None,
                name: str = "heldout_loss") -> dict[int, float]:
    """(recipe - bf16) / bf16 of a held-out loss, by seed.

    Args:
        step: None is the end.
        name: the recipe's curve. bf16's is always "heldout_loss".
    """

    def loss(one: dict, name: str) -> float | None:
        return one["curves"].get(name, {}).get(step or str(one["case"]["steps"]))

    pairs = {seed: (loss(one, name), loss(bases[seed], "heldout_loss")) for seed, one in found.items()
             if seed in bases}
    return {seed: value / base - 1 for seed, (value, base) in pairs.items() if value is not None and base is not None}


def starts_apart(one: dict, base: dict) -> bool:
    """Whether two runs have other losses before the first step, both in bf16, so that they are no pair."""
    own = one["curves"].get("heldout_loss_bf16") or one["curves"]["heldout_loss"]
    other = base["curves"]["heldout_loss"]
    return "0" in own and "0" in other and abs(own["0"] / other["0"] - 1) > SAME_START


def verdict(difference: Interval, less: Interval | None, spread: float | None) -> tuple[str, float | None]:
    """What the intervals say, and by how much they miss LIMIT.

    Args:
        difference: of the recipe from bf16.
        less: of the same less the yardstick, paired by seed.
        spread: of one pair of the yardstick.
    """
    if difference.high is None:
        return "one pair says nothing about the spread", None
    if difference.high <= LIMIT:
        return f"costs at most {LIMIT:.2%}", 0.0
    spread = spread or difference.spread
    pairs = paired.pairs_needed(spread, LIMIT)
    takes = f"A recipe that costs nothing would need {pairs or f'more than {paired.MOST_PAIRS}'} seeds to show it " \
            f"at a spread of {spread:.2%}"
    beyond = difference.high - LIMIT
    if less is not None and less.low is not None and less.mean <= LIMIT and less.low <= 0:
        half = (less.high - less.low) / 2
        return f"no worse than another order of sums, to within {half:.2%}. {takes}", 0.0
    if difference.low > 0:
        return f"costs quality: the interval lies above 0. {takes}", beyond
    return f"open. {takes}", beyond


def prepare(result: dict) -> list[dict]:
    """One row for each case and recipe: means over its seeds and paired differences. Training figures are medians of
    the last tenth."""
    cases: dict = {}
    for one in result["rows"]:
        case = {key: one["case"].get(key) for key in ("size", "steps", "tokens_per_step", "expert_parallel")}
        cases.setdefault(json.dumps(case), {}).setdefault(one["contender"], {})[one["case"]["seed"]] = one
    rows = []
    for case, recipes in cases.items():
        right = {name: {seed: one for seed, one in found.items() if one["correct"]} for name, found in recipes.items()}
        for name, found in recipes.items():
            bases = right.get(base_of(name), {})
            apart = [seed for seed, one in right[name].items() if seed in bases and starts_apart(one, bases[seed])]
            one = {"case": json.loads(case), "contender": name, "seeds": len(found), **means(found),
                   "correct": all(one["correct"] for one in found.values()), **comparison(name, right)}
            if apart:
                one |= {"correct": False, "failure": f"seeds {apart} do not start with the loss of {base_of(name)}"}
            rows.append(one)
    return rows


def means(found: dict[int, dict]) -> dict:
    rows = list(found.values())
    curves = {name: {int(step): _mean(one["curves"][name][step] for one in rows if step in one["curves"].get(name, {}))
                     for step in rows[0]["curves"].get(name, ())} for name in CURVES}
    last = {name: median(list(curves[name].values())[-max(1, len(curves[name]) // 10):]) for name in TRAINING}
    roundings = sorted({rounding for one in rows for rounding in one.get("roundings", ())})
    return {"heldout_loss": fmean(one["heldout_loss"] for one in rows), "curves": curves, **last,
            "roundings": ", ".join(roundings)} | ({"sqnr_db": min(last_of.values())} if (
                last_of := list(curves["sqnr_db"].values())[-1:]) and (last_of := last_of[0]) else {})


def _mean(values: Iterable) -> float | dict:
    values = list(values)
    if isinstance(values[0], dict):
        return {key: _mean(one[key] for one in values if key in one) for key in values[0]}
    return fmean(values)


def comparison(name: str, recipes: dict[str, dict[int, dict]]) -> dict:
    """The paired differences of a recipe. Nothing for one that others are compared with."""
    found, bases = recipes[name], recipes.get(base_of(name), {})
    by_seed = differences(found, bases)
    if name == base_of(name) or not by_seed:
        return {}
    difference = paired.interval(list(by_seed.values()))
    out = {"pairs": difference.pairs, "difference": difference.mean, "spread": difference.spread,
           "low": difference.low, "high": difference.high, "by_seed": by_seed}
    in_bf16 = differences(found, bases, name="heldout_loss_bf16")
    if in_bf16:
        out["in_bf16"] = fmean(in_bf16.values())
    steps = [step for step in next(iter(found.values()))["curves"]["heldout_loss"] if step != "0"]
    out["over_steps"] = {int(step): paired.interval(list(values.values())) for step in steps
                         if (values := differences(found, bases, step))}
    if name == YARDSTICK:
        return out
    yardstick = differences(recipes.get(YARDSTICK, {}), bases) if base_of(name) == BF16 else {}
    both = [by_seed[seed] - yardstick[seed] for seed in by_seed.keys() & yardstick.keys()]
    less = paired.interval(both) if both else None
    if less:
        out |= {"less": less.mean, "less_low": less.low, "less_high": less.high}
    spread = paired.interval(list(yardstick.values())).spread if yardstick else None
    out["verdict"], beyond = verdict(difference, less, spread)
    return out | ({} if beyond is None else {"beyond": beyond})


# ---- how results are shown ------------------------------------------------------------------------------------------

TRAINING = {"loss": "training loss", "grad_norm": "gradient norm", "busiest_expert": "share of the busiest expert"}
QUANTIZED = (*(name for name, recipe in RECIPES.items() if recipe.quantizes), OWN)
MEASURES = [
    Measure("held-out loss, mean of paired differences to bf16", QUANTIZED, figure="difference", better=show.SMALLER,
            form="{:+.2%}", main=True),
    Measure("upper end of its 95 % interval", QUANTIZED, figure="high", better=show.SMALLER, form="{:+.2%}",
            main=True),
    Measure("beyond 0.25 %, by its interval or less the yardstick", ("default_128", "mxfp8_128"),
            figure="beyond", better=show.SMALLER, form="{:.2%}")]


def sentences(prepared: dict) -> list[str]:
    """One sentence for each recipe that is compared with bf16."""
    found = []
    for one in prepared["rows"]:
        if "difference" in one:
            interval = "" if one["high"] is None else f" [{one['low']:+.2%}, {one['high']:+.2%}]"
            less = "" if one.get("less_low") is None else (
                f"; less the yardstick {one['less']:+.2%} [{one['less_low']:+.2%}, {one['less_high']:+.2%}]")
            found.append(f"- {one['case']['size']}, {one['contender']}: {one['difference']:+.2%}{interval} of the "
                         f"held-out loss; seeds: {one['pairs']}{less}. {one.get('verdict', 'The yardstick')}.")
    return found


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    for one in result["rows"]:
        size, name = one["case"]["size"], one["contender"]
        if "difference" in one:
            panels.setdefault(f"{size}: held-out loss over bf16's, mean and 95 % interval, %", {})[name] = [
                (step, 100 * of.mean, *(100 * (of.mean if end is None else end) for end in (of.low, of.high)))
                for step, of in one["over_steps"].items()]
            panels.setdefault(f"{size}: the same at the end by seed, %", {})[name] = [
                (seed, 100 * value) for seed, value in one["by_seed"].items()]
        for curve, title in ({"heldout_loss": "held-out loss"} | TRAINING).items():
            panels.setdefault(f"{size}: {title}", {})[name] = list(one["curves"][curve].items())
        for curve, title in (("sqnr_db", "SQNR, dB"), ("shrinkage", "shrinkage")) if name in (*MAIN, OWN) else ():
            for step, of in one["curves"].get(curve, {}).items():
                for rounding, value in of.items():
                    panels.setdefault(f"{size}, {name}: {title}", {}).setdefault(rounding, []).append(
                        (step, min(value, MOST_DB)))
    log = {title: {"yscale": "log"} for title in panels if title.endswith((": held-out loss", *TRAINING.values()))}
    show.lines(pyplot, panels, "step, or seed", "", columns=4, of_panels=log)


SHOWN = show.Shown("convergence", MEASURES, [
    ("seeds", "seeds", "{}"), ("held-out loss", "heldout_loss", "{:.4f}"), ("to bf16", "difference", "{:+.2%}"),
    ("95 % from", "low", "{:+.2%}"), ("to", "high", "{:+.2%}"), ("spread of a pair", "spread", "{:.2%}"),
    ("less the yardstick", "less", "{:+.2%}"), ("95 % from", "less_low", "{:+.2%}"), ("to", "less_high", "{:+.2%}"),
    ("to bf16, its weights used in bf16", "in_bf16", "{:+.2%}"), ("training loss", "loss", "{:.4f}"),
    ("gradient norm", "grad_norm", "{:.3f}"), ("busiest expert", "busiest_expert", "{:.1%}"),
    ("lowest SQNR, dB", "sqnr_db", "{:.1f}"), ("roundings that acted", "roundings", "{}")], plot, wide=False,
    prepare=prepare, sentences=sentences)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse_args()
    if args.rank_of:
        size, recipe, seed = args.rank_of
        convergence_run.rank_main(Run(size, recipe, int(seed)), args)
        return
    if args.show:
        sys.exit(show.show(SHOWN, args.show, args.check) or None)
    convergence_run.store_tokens(args.data, args.state, args.hf_model)
    known, known_commit = known_rows(args)
    runs = plan(args)
    path = args.out or results_file.RESULTS / "convergence.json"
    commit = known_commit or args.commit or results_file.commit()

    def store() -> int:
        """Writes what is finished; how many runs of this study that is."""
        rows = known | {one: row(args.state / one.name) for one in runs if one not in known and finished(one, args)}
        if rows:
            results_file.write("convergence", list(rows.values()), path, commit)
        return len(rows.keys() & set(runs))

    good = work([one for one in runs if one not in known], args, store)
    done = store()
    say(f"{done} of {len(runs)} runs are finished" + (
        "" if done == len(runs) else f": run this again with --known {path.name}"))
    if not done:
        sys.exit("no run is finished: nothing to show yet")
    error = show.show(SHOWN, path, args.check)
    sys.exit(error or (None if good else "a run failed"))


if __name__ == "__main__":
    main()
