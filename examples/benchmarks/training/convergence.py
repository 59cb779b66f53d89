# SPDX-License-Identifier: Apache-2.0
"""Does MXFP8 cost quality? Whole trainings in pairs: each recipe beside bf16, seed by seed.

Runs of one seed have the same initial weights, batches and random draws (convergence_run.py). The result is the mean
of the paired differences of held-out loss, with a 95 % interval. Training amplifies every difference of rounding. The
yardstick is therefore bf16 against "reordered": bf16 with another order of sums. examples/guides/quality.md explains
the method.

    python examples/benchmarks/training/convergence.py --sizes 50M --sharing 8 --seconds 540
    python examples/benchmarks/training/convergence.py --hf_model FOLDER --ds_config FILE --data FOLDER --out ab.json

The first command trains for that many seconds, the most important runs first, as many side by side as --sharing says,
and shows what is finished. A run that does not finish in time is lost. --known FILE takes the finished runs of a
result file as they are, so that the study goes on in pieces, also on other machines. Runs share the machine, so their
speed says nothing. The second command compares a user's section "mxfp8_moe" with bf16, on their model and data.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

from arguments import one_or_more
from finetune import free_port
from lib import results_file, run, show
from training import convergence_run
from training.convergence_results import SHOWN, row
from training.convergence_run import BF16, NUDGED, OWN, RECIPES, ROOT, SIZES, YARDSTICK, Run

MAIN = (BF16, "default_128", YARDSTICK, "mxfp8_128")
FURTHER = ("default_32", "wires_128", "classic_bf16", "classic_default_128")
# Seeds of each recipe. With 16, the standard error of a mean difference is 0.2 % at 50M, and 0.1 % at 300M.
STUDY = {"50M": dict.fromkeys(MAIN, 16) | dict.fromkeys(FURTHER, 3), "300M": dict.fromkeys((*MAIN, NUDGED), 16),
         "tiny": dict.fromkeys(MAIN, 2), OWN: dict.fromkeys((BF16, OWN, YARDSTICK), 3)}
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
    parser.add_argument("--stop_after", type=one_or_more, metavar="STEPS", help="end each run after this many of its "
                        "steps. The training loss shows early where a rounding does harm")
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
    if args.stop_after and args.stop_after > args.steps:
        parser.error(f"--stop_after {args.stop_after}: expected at most the {args.steps} --steps")
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
    """All runs, the most important ones first: seed by seed, and the recipes of FURTHER last."""
    runs = []
    for size in args.sizes:
        seeds = dict.fromkeys(args.recipes, STUDY[size][BF16]) if args.recipes else STUDY[size]
        if args.seeds:
            seeds = dict.fromkeys(seeds, args.seeds)
        found = [Run(size, recipe, seed) for seed in range(max(seeds.values())) for recipe in seeds
                 if seed < seeds[recipe]]
        runs += found if args.recipes else sorted(found, key=lambda one: one.recipe in FURTHER)
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


class Ranks:
    """The processes of one run. They belong to this process's session, and end with it."""

    def __init__(self, processes: list[subprocess.Popen]):
        self.processes = processes

    def poll(self) -> int | None:
        """None while they run, 0 if all have ended well. If one has failed, the others are ended too."""
        codes = [process.poll() for process in self.processes]
        failed = next((code for code in codes if code), None)
        if failed:
            self.end()
        return failed or (None if None in codes else 0)

    def end(self) -> None:
        for process in self.processes:
            process.kill()  # nothing of it is kept
        for process in self.processes:
            process.wait()


def launch(run: Run, place: str | None, args: argparse.Namespace) -> Ranks:
    """Starts the ranks of one run, which write into its folder."""
    folder = args.state / run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)  # of a run with other arguments
    threads = max(1, (os.cpu_count() or 1) // (len(places(args)) * args.ranks))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": place} if place else {"DS_ACCELERATOR": "cpu"}) | {
        "OMP_NUM_THREADS": str(threads), "WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, *args.arguments, "--rank_of", *map(str, run)]
    with (folder / "output.txt").open("w") as output:
        return Ranks([subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                                       stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                      for rank in range(args.ranks)])


def asked(args: argparse.Namespace) -> dict:
    """What a case must agree in with the arguments."""
    return {"steps": args.steps, "stopped_after": args.stop_after, "ranks": args.ranks,
            "heldout_windows": args.heldout_windows,
            "data_sha256": json.loads((args.state / "tokens.json").read_text())["sha256"][:16]}


def given(case: dict, wanted: dict) -> dict:
    """What a case has where `asked` has what is wanted."""
    return {key: case.get(key) for key in wanted}


def finished(run: Run, args: argparse.Namespace) -> bool:
    """Whether --state has this run from its start to its end, with these arguments."""
    path = args.state / run.name / "summary.json"
    if not path.exists():
        return False
    summary, wanted = json.loads(path.read_text()), asked(args)
    return (given(summary["case"], wanted) == wanted
            and summary["section"] == convergence_run.recipe_of(run, args).section)


def say(line: str) -> None:
    print(f"{time.time() - STARTED:5.0f} s  {line}", file=sys.stderr, flush=True)


def known_rows(args: argparse.Namespace) -> tuple[dict[Run, dict], list[dict], str | None]:
    """The rows of --known by their runs, those of runs that were stopped elsewhere, and its commit.

    Exits if they are of other runs than asked for.
    """
    if args.known is None:
        return {}, [], None
    result = results_file.read(args.known, "convergence")
    found, elsewhere = {}, []
    for one in result["rows"]:
        if one["case"].get("stopped_after") == args.stop_after:
            found[Run(one["case"]["size"], one["contender"], one["case"]["seed"])] = one
        else:
            elsewhere.append(one)
    planned, wanted = set(plan(args)), asked(args)
    for one, known in found.items():
        of = given(known["case"], wanted)
        if of != wanted:
            sys.exit(f"--known {args.known} has runs of {of}, and these are of {wanted}: leave it out")
        if one in planned and known.get("section") != (section := convergence_run.recipe_of(one, args).section):
            sys.exit(f"--known {args.known} has {one.name} with the section {known.get('section')}, and it is "
                     f"{section} now: leave it out")
    return found, elsewhere, result["commit"]


def work(runs: Iterable[Run], args: argparse.Namespace, store: Callable[[], None]) -> bool:
    """Runs what is not finished until this process is args.seconds old. Calls `store` whenever a run has finished.

    A run is started if as much time is left as the longest one of its size took here.

    Returns:
        Whether no run failed.
    """
    until = STARTED + args.seconds - ENDING_S
    waiting = [one for one in runs if not finished(one, args)]
    free, running, took, good = places(args), {}, {}, True
    try:
        while True:
            for one in list(waiting):
                if free and time.time() + took.get(one.size, SHORTEST_S) <= until:
                    waiting.remove(one)
                    place = free.pop(0)
                    say(f"{one.name} on {place or 'the CPU'}")
                    running[one] = place, launch(one, place, args), time.time()
            if not running or time.time() > until:
                break
            time.sleep(0.2)
            for one, (place, ranks, begin) in list(running.items()):
                code = ranks.poll()
                if code is None:
                    continue
                del running[one]
                free.append(place)
                if code or not finished(one, args):
                    good = False
                    output = (args.state / one.name / "output.txt").read_text()
                    say(f"{one.name} failed with {code}:\n{output[-3000:]}")
                    continue
                took[one.size] = max(took.get(one.size, 0.0), time.time() - begin)
                say(f"{one.name}: finished")
                store()
    finally:
        for one, (_, ranks, _) in running.items():
            ranks.end()
            say(f"{one.name}: no time to finish it")
    if waiting:
        say(f"no time for {len(waiting)} runs, beginning with {waiting[0].name}: "
            f"--seconds {args.seconds:.0f} leaves less than a run takes")
    return good


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
    known, elsewhere, known_commit = known_rows(args)
    runs = plan(args)
    path = args.out or results_file.RESULTS / "convergence.json"
    commit = known_commit or args.commit or results_file.commit()

    def store() -> int:
        """Writes what is finished; how many runs of this study that is."""
        rows = known | {one: row(args.state / one.name) for one in runs if one not in known and finished(one, args)}
        if rows:
            results_file.write("convergence", [*rows.values(), *elsewhere], path, commit)
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
