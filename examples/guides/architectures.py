# SPDX-License-Identifier: Apache-2.0
"""Trains a small model of every MoE type in the installed transformers, beside transformers' own experts.

    python examples/guides/architectures.py                              # all types; writes the result and the page
    python examples/guides/architectures.py --types mixtral gemma4       # prints these
    python examples/guides/architectures.py --update                     # those that the stored result lacks
    python examples/guides/architectures.py --losses                     # without adapters, reload and replay

Runs on CPUs, over gloo, with two ranks that share the experts. small_models.py finds the types. Each trains from the
same weights on the same batches with transformers' experts on every rank, with ours in bf16, and with ours in MXFP8.
The last engine also records and replays routes, and saves a model that transformers loads. Adapters of the experts
take a step beside PEFT without this package.

Both ranks end after TYPES types, or when one hangs. They are forked from a process that has imported everything.
"""

import argparse
import io
import multiprocessing as mp
import os
import re
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "benchmarks")]

import deepspeed  # noqa: E402
import deepspeed.comm as dist  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tabulate import tabulate  # noqa: E402
from tqdm import tqdm  # noqa: E402

import ds_mxfp8_moe  # noqa: E402
from ds_mxfp8_moe.layers.experts import converted_layers  # noqa: E402
from lib import results_file  # noqa: E402
from small_models import (  # noqa: E402
    EXPERTS,
    FIRST_TOKEN,
    VOCABULARY,
    decorated_types,
    experts_of,
    loss_of,
    small_model,
)

STEPS, RANKS = 6, 2
TYPES, SECONDS = 12, 300.0  # of the same processes; for each type
BARS = {"bf16": 0.0035, "mxfp8": 0.006}  # the largest relative difference of losses at any step
RESULT, PAGE = results_file.RESULTS / "architectures.json", Path(__file__).with_suffix(".md")
LOSSES = RESULT.with_name("architectures_losses_*.json")  # the star: the release of transformers
SECTIONS = {"bf16": {"enabled": True, "recipe": "bf16"}, "mxfp8": {"enabled": True}}
HEADERS = {"type": "model type", "model": "class", "converted": "converted", "first": "first loss",
           "last": "last loss", "weight": "weight", "bf16": "bf16", "mxfp8": "MXFP8", "lora": "LoRA",
           "reload": "reload", "replay": "replay", "remark": "remark"}


def difference(first: list[float], second: list[float]) -> float:
    """The largest relative difference at any step. NaN if one of the numbers is NaN."""
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    return ((a - b).abs() / b.abs()).max().item()


def engine_of(model: torch.nn.Module, section: dict | None, bf16: bool) -> deepspeed.DeepSpeedEngine:
    """Collective.

    Args:
        section: "mxfp8_moe". None: transformers' own experts, in plain data parallelism.
        bf16: DeepSpeed's section "bf16", which casts all parameters.
    """
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}, "bf16": {"enabled": bf16},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    if section is not None:
        config |= {"mxfp8_moe": section, "expert_parallel": {"enabled": True, "autoep_size": RANKS}}
    trained = [p for p in model.parameters() if p.requires_grad] if section is None else None
    return ds_mxfp8_moe.initialize(model=model, config=config, model_parameters=trained)[0]


def tokens_of(seed: int = 7) -> torch.Tensor:
    """[4, 32], other ones on every rank."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randint(FIRST_TOKEN, VOCABULARY, (4, 32), generator=generator)


def mean_loss(engine: deepspeed.DeepSpeedEngine, model: torch.nn.Module, seed: int) -> tuple[torch.Tensor, float]:
    """The loss of this rank, and its mean over the ranks. Collective.

    Args:
        model: the transformers model inside the engine.
        seed: of routers that draw at random.
    """
    torch.manual_seed(1000 * seed + dist.get_rank())
    loss = loss_of(model, tokens_of(), engine)
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    return loss, mean.item() / dist.get_world_size()


def train(engine: deepspeed.DeepSpeedEngine, model: torch.nn.Module, steps: int = STEPS) -> list[float]:
    """The mean loss of all ranks before each step. Collective."""
    found = []
    for step in range(steps):
        loss, mean = mean_loss(engine, model, step)
        found.append(mean)
        engine.backward(loss)
        engine.step()
    return found


@contextmanager
def experts_silent(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context, transformers' experts give zeros."""
    hooks = [experts.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
             for experts in experts_of(model).values()]
    yield
    for hook in hooks:
        hook.remove()


def lora_losses(model_type: str, section: dict | None, bf16: bool) -> list[float]:
    """The mean loss before and after one step of the experts' adapters. Collective."""
    model = small_model(model_type)
    names = {f"experts.{name}" for experts in experts_of(model).values()
             for name in ("gate_up_proj", "up_proj", "down_proj") if hasattr(experts, name)}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=64, target_parameters=sorted(names)))
    engine = engine_of(adapted, section, bf16)
    before = train(engine, model, 1)
    after = mean_loss(engine, model, 1)[1]
    engine.destroy()
    return [*before, after]


def replayed(engine: deepspeed.DeepSpeedEngine, model: torch.nn.Module) -> dict[str, Any]:
    """Whether a replayed recording gives the bits of the forward that it is from. If it does, and the model takes no
    other routes, this is the remark. Collective."""
    model.train()
    with ds_mxfp8_moe.record_routes(engine) as routes:
        recorded = mean_loss(engine, model, STEPS)[1]
    with ds_mxfp8_moe.replay_routes(engine, routes):
        same = mean_loss(engine, model, STEPS)[1] == recorded
    try:
        with ds_mxfp8_moe.replay_routes(engine, [(one + 1) % EXPERTS for one in routes]):
            mean_loss(engine, model, STEPS)
    except RuntimeError as error:
        return {"replay": same, "remark": f"replays its own choice alone: {error}"}
    return {"replay": same}


def reload_difference(engine: deepspeed.DeepSpeedEngine, model: torch.nn.Module) -> float:
    """How far the loss of transformers' model is that loads what `save_pretrained` wrote. Collective."""
    model.eval()
    ours = mean_loss(engine, model, STEPS)[1]
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder, src=0)
    ds_mxfp8_moe.save_pretrained(engine, folder[0])
    kind = next(one for one in type(model).__mro__ if one.__module__.startswith("transformers.models."))
    loaded, told = kind.from_pretrained(folder[0], dtype=torch.bfloat16, output_loading_info=True)
    if found := {key: names for key, names in told.items() if names}:
        raise AssertionError(f"transformers says of the saved model: {found}")
    return difference([mean_loss(loaded.eval(), loaded, STEPS)[1]], [ours])


def measure(model_type: str, losses_alone: bool, bf16: bool = True) -> dict[str, Any]:
    """The row of one type. Collective. What fails is the reason, and what comes after it is still tried.

    Where plain DeepSpeed fails with its section "bf16", all runs again without it. `bf16`: see `engine_of`.
    """
    started, row = time.perf_counter(), {"type": model_type}

    def attempt(name: str, call: Callable[[], dict]) -> bool:
        """Whether it succeeded on all ranks."""
        failure, printed = None, io.StringIO()
        try:
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                row.update(call())
        except Exception as error:
            failure = f"{name}: {type(error).__name__}: {error}"[:500]
        if whole := re.search("as transformers computes them: (.*)", printed.getvalue()):
            row["whole"] = whole[1]
        failures: list = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        if failure := next(filter(None, failures), None):
            row["reason"] = "; ".join(filter(None, [row.get("reason"), failure]))
        return failure is None

    def plain() -> dict:
        model = small_model(model_type)
        row["model"] = type(model).__name__
        engine = engine_of(model, None, bf16)
        own.extend(train(engine, model))
        with experts_silent(model):
            silent = mean_loss(engine, model, STEPS - 1)[1]
        engine.destroy()
        return {"first": own[0], "last": own[-1], "weight": difference([silent], own[-1:])}

    def ours(name: str) -> dict:
        model = small_model(model_type)
        layers = len(experts_of(model))
        engines[name] = engine_of(model, SECTIONS[name], bf16), model
        found = {"converted": f"{len(converted_layers(model))} of {layers}"}
        return {**found, name: difference(train(*engines[name]), own)}

    def lora() -> dict:
        ours, theirs = (lora_losses(model_type, section, bf16) for section in (SECTIONS["mxfp8"], None))
        return {"lora": difference(ours, theirs)}

    def in_float32() -> dict:
        losses = []
        for section in (SECTIONS["bf16"], None):
            model = small_model(model_type, torch.float32)
            engine = engine_of(model, section, False)
            losses.append(train(engine, model))
            engine.destroy()
        return {"float32": difference(*losses)}

    own: list[float] = []
    engines: dict[str, tuple] = {}
    if not attempt("plain", plain):
        if bf16 and "reason" not in (again := measure(model_type, losses_alone, bf16=False)):
            return {**again, "remark": f"without DeepSpeed's section bf16, which casts what transformers keeps in "
                    f"float32. With it, {row['reason'].removeprefix('plain: ')}"}
        return row
    if attempt("bf16", lambda: ours("bf16")):
        engines.pop("bf16")[0].destroy()
        if not row["bf16"] <= BARS["bf16"]:
            attempt("float32", in_float32)
    if row.get("converted", "0")[0] != "0":
        if attempt("mxfp8", lambda: ours("mxfp8")) and not losses_alone:
            attempt("reload", lambda: {"reload": reload_difference(*engines["mxfp8"])})
            attempt("replay", lambda: replayed(*engines["mxfp8"]))
            engines.pop("mxfp8")[0].destroy()
        if not losses_alone:
            attempt("lora", lora)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with "correct", and a "reason" if it is not."""
    far = [name for name, bar in {**BARS, "lora": BARS["mxfp8"], "reload": BARS["mxfp8"]}.items()
           if name in row and not row[name] <= bar]
    count, layers = map(int, row.get("converted", "0 of 1").split(" of "))
    if "reason" not in row:
        if count < layers:
            row["reason"] = f"{layers - count} layers stay transformers' own: {row.get('whole', 'no line says why')}"
        elif far:
            row["reason"] = f"farther from transformers than {' and '.join(far)} may be"
        elif not row.get("replay", True):
            row["reason"] = "a replay gives another loss"
    if "float32" in row:
        row["reason"] += f"; in float32, the losses differ by {row['float32']:.1e}"
    return {**row, "correct": "reason" not in row}


def losses_agree(row: dict[str, Any]) -> bool:
    """Whether all layers are converted, and both recipes within their bars."""
    count, layers = row.get("converted", "0 of 1").split(" of ")
    return count == layers and all(row.get(name, 1) <= bar for name, bar in BARS.items())


def _rank(rank: int, port: int, types: list[str], losses_alone: bool, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    for model_type in types:
        row = measure(model_type, losses_alone)
        if rank == 0:
            pipe.send(row)
    dist.destroy_process_group()


@contextmanager
def _ranks(types: list[str], losses_alone: bool) -> Iterator[Connection]:
    """Processes that measure these types, and where their rows arrive."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["architectures"])
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_rank, args=(rank, port, types, losses_alone, sender)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    sender.close()
    try:
        yield receiver
    finally:
        receiver.close()
        for rank in ranks:
            rank.join(timeout=5)
            rank.kill()


def rows_of(types: list[str], losses_alone: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of these types, each when it is there. One that hangs, or takes a process down, fails alone."""
    left = list(types)
    while left:
        with _ranks(left[:TYPES], losses_alone) as rows:
            for model_type in left[:TYPES]:
                left.remove(model_type)
                try:
                    if rows.poll(SECONDS):
                        yield judged(rows.recv())
                        continue
                    reason = f"it took more than {SECONDS:.0f} s"
                except EOFError:
                    reason = "its processes died"
                yield judged({"type": model_type, "reason": reason})
                break


def cells(rows: list[dict[str, Any]], keys: Iterable[str] = HEADERS) -> list[list[str]]:
    """Of the table, in the order of `keys`."""
    def cell(row: dict[str, Any], key: str) -> str:
        value = row.get("reason", row.get("remark", "")) if key == "remark" else row.get(key, "")
        if isinstance(value, bool):
            return "same bits" if value else "differs"
        if isinstance(value, float):
            return f"{value:.2f}" if key in ("first", "last") else f"{value:.2%}"
        return textwrap.shorten(value.replace("|", "/"), 200)

    return [[cell(row, key) for key in keys] for row in rows]


def pages() -> dict[Path, str]:
    """The guide, and the page of all figures beside the stored results, as Markdown."""
    result = results_file.read(RESULT, "architectures")
    packages = ("torch", "transformers", "deepspeed", "peft")
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in packages)
    rows = [{**row["case"], **row} for row in result["rows"]]
    agreeing = [row["type"] for row in rows if losses_agree(row)]
    others = "".join(f" With transformers {losses['versions']['transformers']}, the losses of "
                     f"{sum(map(losses_agree, losses['rows']))} of {len(losses['rows'])} types agree."
                     for losses in (results_file.read(path, "architectures")
                                    for path in sorted(LOSSES.parent.glob(LOSSES.name))))
    remarks: dict[str, list[str]] = {}
    for name, remark in cells(rows, ("type", "remark")):
        if remark:
            remarks.setdefault(remark, []).append(name)
    guide = [
        "# Architectures",
        f"Every model type whose experts transformers stacks (decorator `use_experts_implementation`) is spread and "
        f"computed in MXFP8. On a CPU, tiny models of {len(agreeing)} of {len(rows)} types have transformers' losses, "
        f"and {sum(row['correct'] for row in rows)} of them also PEFT's with LoRA, the same after saving, and with "
        f"replayed routes: [the figures](../benchmarks/results/{RESULT.stem}.md).{others}",
        ", ".join(agreeing) + ".",
        "What is different:\n\n" + "\n".join(f"- {', '.join(names)}: {remark}" for remark, names in remarks.items())]
    about = [
        f"# {RESULT.stem}",
        f"Written by `python examples/guides/{Path(__file__).name}` on a CPU, with {versions}. It makes a model with "
        f"{EXPERTS} experts and random weights from the default config of each model type. It trains {STEPS} steps on "
        f"{RANKS} ranks that share the experts, and {STEPS} steps in plain data parallelism with transformers' own "
        "experts, on the same batches from the same weights.",
        "*Weight* says how far the last loss moves if the experts give nothing. *bf16* and *MXFP8* are the largest "
        "relative difference of the loss at any step, in these recipes of ours. They must be at most "
        f"{BARS['bf16']:.2%} and {BARS['mxfp8']:.2%}. *LoRA* is the difference from PEFT's loss before and after one "
        "step of adapters on all experts, in MXFP8. *Reload* is the difference between the loss of the engine in "
        "MXFP8 and the loss of the model that transformers loads after `save_pretrained`. *Replay* says whether the "
        "loss is the same if recorded routes are replayed; a remark names models that take no other routes."]
    table = [HEADERS.values(), [":---"] * len(HEADERS), *cells(rows)]
    return {PAGE: "\n\n".join(_wrapped(text) for text in guide) + "\n",
            RESULT.with_suffix(".md"): "\n\n".join([*map(_wrapped, about), "\n".join(
                f"| {' | '.join(row)} |" for row in table)]) + "\n"}


def _wrapped(text: str) -> str:
    return text if "\n" in text else textwrap.fill(text, 119, break_on_hyphens=False)


def write_pages() -> None:
    for path, text in pages().items():
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="print these and write nothing. Default: all "
                        f"types, written to {RESULT.name} and {PAGE.name}")
    parser.add_argument("--update", action="store_true",
                        help="keep the rows of the stored result, and run --types, or the types without a row")
    parser.add_argument("--losses", action="store_true", help="leave out adapters, reload and replay. The result gets "
                        "a file of its own for each release of transformers, and a line of the page")
    parser.add_argument("--show", action="store_true", help="write the page from the stored results, and run nothing")
    arguments = parser.parse_args()
    result = LOSSES.with_name(LOSSES.name.replace("*", transformers.__version__)) if arguments.losses else RESULT
    if arguments.show:
        write_pages()
        return
    known = decorated_types()
    if unknown := set(arguments.types or ()) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    stored = results_file.read(result, "architectures")["rows"] if arguments.update and result.exists() else []
    rows = {row["case"]["type"]: {**row["case"], **row} for row in stored}
    types = arguments.types or [one for one in known if one not in rows]
    for row in (bar := tqdm(rows_of(types, arguments.losses), total=len(types), unit="type")):
        bar.set_postfix_str(row["type"])
        rows[row["type"]] = row
        if arguments.update or not arguments.types:
            results_file.write("architectures", [{"case": {"type": one}, **rows[one]} for one in sorted(rows)], result)
            write_pages()
    print(tabulate(cells([rows[one] for one in types]), HEADERS.values(), disable_numparse=True))
    if bad := [one for one in types if not rows[one]["correct"]]:
        sys.exit(f"{len(bad)} of {len(types)} types do not agree with transformers")


if __name__ == "__main__":
    main()
