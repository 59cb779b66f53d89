# SPDX-License-Identifier: Apache-2.0
"""One MoE layer, router to output, SwiGLU experts, forward and backward: DeepSpeed's classic MoE and AutoEP in bf16
beside ours in every recipe, over every transport that the machine has.

Each contender is a layer of a DeepSpeed engine of its own (ZeRO-1), as users make it: ours by the section "mxfp8_moe".
Gradients of the tokens and of every parameter of the layer. Each timed step follows an untimed one of the same layer,
as in a training, where the host has just run the same code for the layer before; the ranks' devices begin it together,
so that what a layer waits for the host shows. Also peak memory beyond the weights, and how often the host waits for
the device in a forward and backward.

    torchrun --nproc-per-node 8 examples/benchmarks/exchange/moe_layer.py   # run, store, show
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from deepspeed.moe.layer import MoE
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_mxfp8_moe
from ds_mxfp8_moe.config import WIRE_KEYS
from ds_mxfp8_moe.mx import sqnr_db
from ds_mxfp8_moe.transport import deadline
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from lib import run, show, timing, world
from lib.show import Measure
from lib.timing import TOTAL, Contender, poisoned
from lib.world import BF16, device, on_gpu

AUTOEP, CLASSIC, DROPLESS = "AutoEP bf16", "classic bf16, drops", "classic bf16, dropless"
BF16_EXACT, HP_EXACT = "nvlink, bf16", "nvlink, mxfp8_wgrad_with_hp"
HP_STATIC = "nvlink, mxfp8_wgrad_with_hp, static"
HP_CLASSIC = "nvlink, mxfp8_wgrad_with_hp, classic"
RECIPES = {"bf16": {"recipe": "bf16"}, "mxfp8_wgrad_with_hp": {"recipe": "mxfp8_wgrad_with_hp"},
           "mxfp8": {"recipe": "mxfp8", **dict.fromkeys(WIRE_KEYS, "mxfp8")}}
STATIC = {**RECIPES["mxfp8_wgrad_with_hp"], "transport": "nvlink", "capacity_factor": 2.0}
# Against DeepSpeed's layer in bf16 with the same weights.
LEAST_SQNR_DB, LEAST_SQNR_MXFP8_DB = 35, 17
BUILDING = 0.6  # at most, of a run's time


@dataclass(frozen=True)
class Case:
    tokens: int = 8192
    dim: int = 2048
    hidden: int = 1408
    experts: int = 64
    top_k: int = 6


TINY = Case(tokens=256, dim=128, hidden=128, experts=8, top_k=2)


class SwiGLU(nn.Module):

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(NamedTuple):
    """A layer of an engine.

    Attributes:
        inner: the part of it that a conversion settles.
        outputs: what of its result gets a gradient, the tokens first.
    """

    engine: nn.Module
    module: nn.Module
    inner: nn.Module
    outputs: Callable[[object], tuple]


def staging_bytes(inner: nn.Module) -> int:
    """Of the peer memory that a layer's transport shares with all others. It is not the allocator's."""
    settings = getattr(inner, "mxfp8_settings", None)
    memory = getattr(settings and settings.choose_transport(inner.ep_group), "memory", None)
    return 0 if memory is None else 2 * memory.half_bytes


def _engine(model: nn.Module, section: dict | None, **config) -> nn.Module:
    config |= {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
               "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    if section is not None:
        config["mxfp8_moe"] = {"enabled": True, **section}
    return ds_mxfp8_moe.initialize(model=model, config=config)[0]


def classic(case: Case, drop: bool, section: dict | None = None) -> Layer:
    """deepspeed.moe.layer.MoE, with experts that all differ."""
    torch.manual_seed(0)
    with torch.device(device()):
        expert = SwiGLU(case.dim, case.hidden)
        layer = MoE(case.dim, expert, case.experts, world.size(), k=case.top_k, capacity_factor=1.0, drop_tokens=drop)
        torch.manual_seed(1 + world.rank())
        for parameter in layer.deepspeed_moe.experts.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1]**-0.5)
    engine = _engine(nn.Sequential(layer), section)
    moe = engine.module[0]
    return Layer(engine, moe, moe.deepspeed_moe, lambda out: out[:2])  # with the auxiliary loss


def autoep(case: Case, section: dict | None = None) -> Layer:
    """What AutoEP makes of a Qwen3-MoE's layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=case.dim, intermediate_size=case.dim, moe_intermediate_size=case.hidden,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=case.experts,
        num_experts_per_tok=case.top_k, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
        initializer_range=case.dim**-0.5)
    torch.manual_seed(0)  # the same weights everywhere
    with torch.device(device()):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=BF16)
    engine = _engine(model, section, expert_parallel={"enabled": True, "autoep_size": world.size(),
                                                      "preset_model": "qwen3_moe"})
    moe = engine.module.model.layers[0].mlp
    return Layer(engine, moe, moe, lambda out: (out[0] if isinstance(out, tuple) else out, ))


class Way:
    """One contender: a layer on a rank's tokens, with gradients g of its output."""

    def __init__(self, layer: Layer, x: torch.Tensor, g: torch.Tensor):
        self.layer, self.x, self.g = layer, x.clone().requires_grad_(), g
        self.parameters = [p for p in layer.module.parameters() if p.requires_grad]
        self.stages = {"forward": self.forward, "backward": self.backward}

    def forward(self) -> tuple:
        return self.layer.outputs(self.layer.module(self.x))

    def backward(self, outputs: tuple) -> tuple:
        """The output and the gradients of tokens and parameters."""
        loss_grads = [self.g, *(torch.ones_like(loss) for loss in outputs[1:])]
        return outputs[0].detach(), *torch.autograd.grad(outputs, (self.x, *self.parameters), loss_grads)


def seeded(way: Way) -> tuple:
    """Its results with the same random numbers each time: DeepSpeed's top-2 gate draws some."""
    torch.manual_seed(world.rank())
    return timing.run(way.stages)


def check(way: Way, reference: Way | None, twin: Way | None, least_db: float) -> dict:
    """Runs it once on poisoned memory.

    Args:
        reference: the same layer on DeepSpeed's path, to which results must come close.
        twin: the same recipe over the collective transport, whose bits they must be.
    """
    found = {}
    with poisoned():
        results = seeded(way)
        right = all(bool(part.isfinite().all()) for part in results)
        if reference is not None:
            sqnr = [sqnr_db(a, b) for a, b in zip(seeded(reference), results, strict=True)]
            found["sqnr_db"] = round(min(sqnr), 1)
            right &= min(sqnr) >= least_db
        if twin is not None:
            right &= all(torch.equal(a, b) for a, b in zip(seeded(twin), results, strict=True))
    return {"correct": right, **found}


def memory(way: Way) -> dict[str, int]:
    """Bytes at most beyond the weights in one forward and backward; the staging of peer memory apart."""
    if not on_gpu():
        return {}
    return {"peak_bytes": timing.peak_bytes(partial(timing.run, way.stages)),
            "staging_bytes": staging_bytes(way.layer.inner)}


def waits(way: Way) -> dict[str, int]:
    """How often the host waits for the device in a forward and backward of ours: by the one function of each transport
    that does. tests/gpu checks that nothing else does."""
    if not hasattr(way.layer.inner, "mxfp8_settings"):
        return {}
    with (mock.patch.object(deadline, "wait_for_device", wraps=deadline.wait_for_device) as over_nccl,
          mock.patch.object(PeerMemory, "wait_for_counts", autospec=True,
                            side_effect=PeerMemory.wait_for_counts) as over_nvlink):
        timing.run(way.stages)
    return {"counted_waits": over_nccl.call_count + over_nvlink.call_count}


class Wanted(NamedTuple):
    """A contender before its layer is there.

    Attributes:
        reference, twin: as `check` takes them, by name; no twin where there is no such contender.
    """

    name: str
    build: Callable[[], Layer]
    reference: str | None = None
    twin: str | None = None
    least_db: float = LEAST_SQNR_MXFP8_DB

    def __str__(self) -> str:
        return self.name


def wanted(case: Case) -> list[Wanted]:
    """What matters most comes first."""
    found = [Wanted(AUTOEP, partial(autoep, case)), Wanted(DROPLESS, partial(classic, case, False))]
    transports = sorted(world.transports(), reverse=True)  # nvlink before its twins
    for transport in transports:
        for recipe, keys in reversed(RECIPES.items()):
            found.append(Wanted(f"{transport}, {recipe}", partial(autoep, case, {**keys, "transport": transport}),
                                AUTOEP, f"collective, {recipe}" if transport == "nvlink" else None,
                                LEAST_SQNR_DB if recipe == "bf16" else LEAST_SQNR_MXFP8_DB))
        if transport == "nvlink":
            found.append(Wanted(HP_STATIC, partial(autoep, case, STATIC), AUTOEP))
    best = transports[0]
    return [*found, Wanted(f"{best}, mxfp8_wgrad_with_hp, classic", partial(classic, case, False, {"transport": best}),
                           DROPLESS), Wanted(CLASSIC, partial(classic, case, True))]


def measured_rows(case: Case, budget_s: float, seconds: float = float("inf")) -> Iterator[list[dict]]:
    x, g = (world.randn(1, case.tokens, case.dim) for _ in range(2))
    ways: dict = {}
    contenders = {}
    for one in world.in_time(wanted(case), BUILDING * seconds):

        def build(one=one):
            ways[one.name] = Way(one.build(), x, g)
            return {}

        built = world.everywhere(build)
        if "failure" in built:
            world.say(f"{one}: {built}")
            described = {"operation": TOTAL, "ranks": world.size(), **asdict(case)}
            yield [{"case": described, "contender": one.name, **built}]
        else:
            contenders[one.name] = Contender(ways[one.name].stages, partial(_check, ways, one))
    world.say("all are built")
    rows = timing.rows(asdict(case), contenders, budget_s, warm=True)
    yield rows
    sound = [name for name in contenders if "failure" not in rows_of(rows, name)[0]]
    for name in world.in_time(sound, seconds):
        found = world.everywhere(lambda way=ways[name]: memory(way) | waits(way))
        for row in rows_of(rows, name):
            row.update(found, correct=row["correct"] and found["correct"])
        yield []


def _check(ways: dict, one: Wanted) -> dict:
    return check(ways[one.name], ways.get(one.reference), ways.get(one.twin), one.least_db)


def rows_of(rows: list[dict], contender: str) -> list[dict]:
    return [row for row in rows if row["contender"] == contender]


# ---- how results are shown ------------------------------------------------------------------------------------------


PARTS = ("forward", "backward")
WAITED = {"better": show.SMALLER, "form": "{:g}"}


def prepare(result: dict) -> list[dict]:
    """One row for each layer, with the times of its parts. Host waits are counted of ours alone."""
    of_part = {(row["contender"], row["case"]["operation"]): row for row in result["rows"]}
    rows = []
    for (name, operation), row in of_part.items():
        if operation == TOTAL:
            parts = {f"{part}_ms": of_part.get((name, part), {}).get("median_ms") for part in PARTS}
            case = {key: value for key, value in row["case"].items() if key != "operation"}
            rows.append({**row, **parts, "case": case})
            if name in (AUTOEP, CLASSIC, DROPLESS):
                rows[-1].pop("counted_waits", None)
    return rows


MEASURES = [
    Measure(f"{HP_EXACT} over AutoEP bf16", (HP_EXACT, ), AUTOEP),
    Measure(f"{HP_CLASSIC} over {DROPLESS}", (HP_CLASSIC, ), DROPLESS),
    Measure(f"{HP_EXACT} over our own bf16", (HP_EXACT, ), BF16_EXACT),
    Measure("times that the host waits for the GPU in a step", (HP_EXACT, ), figure="counted_waits", **WAITED),
    Measure("times that the host waits for the GPU in a step, with capacity_factor", (HP_STATIC, ),
            figure="counted_waits", **WAITED)]


def plot(result: dict, pyplot) -> None:
    layers = {row["contender"]: {part: row[f"{part}_ms"] for part in PARTS} for row in result["rows"]}
    show.stacked(pyplot, {"": layers}, "ms")


SHOWN = show.Shown(
    "moe_layer", MEASURES, [*((f"{part}, ms", f"{part}_ms", "{:.3f}") for part in PARTS), show.MS,
                            ("host, ms", "host_ms", "{:.3f}"), ("peak, GiB", "peak_bytes", show.GIB),
                            ("staging, GiB", "staging_bytes", show.GIB), ("host waits", "counted_waits", "{}")],
    plot, wide=False, ratios=((AUTOEP, HP_EXACT), (DROPLESS, HP_CLASSIC)), prepare=prepare)


def main() -> None:
    parser = run.timed_parser(__doc__, budget=0.6, seconds=85)
    for name, value in asdict(Case()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=run.one_or_more,
                            help=f"default: {value}; of --cases tiny {getattr(TINY, name)}")
    args = run.parse(parser)
    asked = {one.name: getattr(args, one.name) for one in fields(Case) if getattr(args, one.name) is not None}
    case = replace(TINY if args.cases == "tiny" else Case(), **asked)
    run.main(SHOWN, args, lambda: measured_rows(case, args.budget, args.seconds - world.ENDING_S), ranks=True)


if __name__ == "__main__":
    main()
