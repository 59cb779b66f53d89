# SPDX-License-Identifier: Apache-2.0
"""A check at first use: every Triton kernel that an engine's layers will launch runs once on a small case.

Compilers have bugs, and a new release, chip or driver may bring one that makes gradients wrong without an error. So
the first engine on a chip with these releases runs a small expert FFN, forward and backward. Each step of it, which is
a method of ExpertMath or of the transport, runs twice: on the GPU by its kernels, and on the CPU in plain torch, from
the same inputs. If one of them raises an error, or differs from plain torch, the layers that need it run without
MXFP8, and if that fails as well, on DeepSpeed's path. The verdict is remembered in a file beside Triton's cache: later
engines on the same chip, with the same releases and the same kernels, read it in a millisecond. The key "self_check"
switches all of this off.

CUDA's kernels of the transport nvlink, which nvcc compiles, are not part of it.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from inspect import isfunction
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from pydantic import TypeAdapter, ValidationError
from torch.distributed import ProcessGroup

from ..compute.formula import Activation, ExpertFormula, LowRank
from ..compute.grouped_gemm import plain
from ..compute.mx import mapped, sqnr_db
from ..compute.recorded import from_python
from ..compute.routing import Routes
from ..compute.sums import Sum
from ..config import Recipe
from ..ffn.expert_ffn import ExpertFFN
from ..ffn.expert_math import ExpertMath, unquantized
from ..ffn.frozen_weights import FORMATS
from ..layers.classic import MXFP8MOELayer
from ..layers.experts import MXFP8Experts
from ..layers.frozen_experts import dtype_of, frozen_of
from ..transport import Transport
from ..transport.collective import Collective
from ..transport.local import Local
from ..transport.releases import digest_of_sources

# Least signal-to-noise ratio of a kernel's result, in dB. Kernels give 45 and more where they do not give the same
# bits: float32 sums in another order, rounded once to bf16. One wrong tile in a hundred gives 20.
LEAST_DB = 35.0
HIDDEN, FFN, EXPERTS, CHOICES = 256, 384, 4, 2
TOKENS, WIDE_COPIES = 200, 36  # copies: so that GEMMs take the tiles for many rows


class Kind(NamedTuple):
    """What a layer's kernels depend on. Layers of the same kind share a check.

    Attributes:
        formula: a `small` one.
        stacked: whether the weights of all experts are one tensor.
        rank: of the adapters of both GEMMs. 0: there are none.
        exchanges: whether rows travel to other ranks.
        frozen: in which format the weights are held alone: a key of FORMATS. "": in none.
        merges: whether adapters are merged into them.
    """

    formula: ExpertFormula
    recipe: Recipe
    dtype: torch.dtype
    stacked: bool = True
    rank: int = 0
    exchanges: bool = False
    frozen: str = ""
    merges: bool = False


class Verdict(NamedTuple):
    """What a check found for a kind.

    Attributes:
        runs: "all", "bf16" (without MXFP8) or "deepspeed".
        found: what is wrong. "": nothing.
    """

    runs: Literal["all", "bf16", "deepspeed"] = "all"
    found: str = ""


ORDER = ("all", "bf16", "deepspeed")  # from good to bad
_FILE = TypeAdapter(tuple[Verdict, dict[str, str]])  # a verdict, and the releases that it is about


class CheckFailed(Exception):
    """A kernel's result differs from plain torch's."""


def kinds_of(layers: Iterable[MXFP8MOELayer | MXFP8Experts]) -> set[Kind]:
    """The kinds of converted layers."""
    found = set()
    for layer in layers:
        settings, stacked = layer.mxfp8_settings, isinstance(layer, MXFP8Experts)
        dtype = dtype_of(layer.experts) if stacked else next(layer.experts.parameters()).dtype
        adapted, frozen = hasattr(layer, "adapters"), frozen_of(layer.experts) if stacked else None
        formula = settings.formula
        if settings.open_formula is not None:  # the GEMMs are checked with another function between them
            formula = formula.with_act(Activation("silu"))
        found.add(Kind(small(formula), settings.recipe, dtype, stacked, rank=8 if adapted else 0,
                       exchanges=layer.ep_size > 1, frozen=frozen.format.lower() if frozen else "",
                       merges=stacked and layer.merges))
    return found


def small(formula: ExpertFormula) -> ExpertFormula:
    """The formula with the sizes of the check and without names."""
    return replace(formula, hidden_size=HIDDEN, ffn_size=FFN, **{role: role for role in formula.names()})  # type: ignore[arg-type]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that all layers follow."""
    return max(verdicts, key=lambda verdict: ORDER.index(verdict.runs), default=Verdict())


def check(kind: Kind, device: torch.device) -> Verdict:
    """The verdict about a kind on a GPU: a remembered one, else by running the kernels."""
    path = _folder() / f"{_digest(kind, device)}.json"
    if (known := _read(path)) is not None:
        return known[0]
    verdict = _run(kind, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # ranks of several containers write the same file
            unfinished = Path(folder, path.name)
            unfinished.write_bytes(_FILE.dump_json((verdict, releases(device))))
            unfinished.replace(path)
    except OSError:
        pass  # not remembered: the next engine checks again
    return verdict


def remembered(device: torch.device) -> list[Verdict]:
    """All verdicts about this chip with these releases."""
    here = releases(device)
    return [known[0] for path in sorted(_folder().glob("*.json")) if (known := _read(path)) and known[1] == here]


def line_about(verdict: Verdict, device: torch.device) -> str:
    """The start-up line about a verdict that is not good."""
    from ..ops.triton_kernels.launcher import RELEASES  # Triton exists on Linux alone
    how = "run in bf16" if verdict.runs == "bf16" else "run DeepSpeed's own path"
    here = ", ".join(f"{name} {value}" for name, value in releases(device).items())
    return (f"mxfp8_moe: WARNING: MoE layers {how}, since a kernel is broken here: {verdict.found}. Here: {here}. "
            f"Tested with Triton {RELEASES[0]} to {RELEASES[-1]}")


def releases(device: torch.device) -> dict[str, str]:
    """The chip, and the releases that make its code."""
    import triton
    driver = Path("/proc/driver/nvidia/version")  # not in every container
    found = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text()) if driver.exists() else None
    return {"chip": torch.cuda.get_device_name(device), "driver": found[0] if found else "unknown",
            "triton": triton.__version__, "ptxas": triton.knobs.nvidia.ptxas.version, "torch": torch.__version__}


def _folder() -> Path:
    import triton
    return Path(triton.knobs.cache.dir) / "ds_mxfp8_moe"


def _digest(kind: Kind, device: torch.device) -> str:
    """Of all that a verdict depends on: the kind, the chip and the releases, and the package's own code."""
    facts = {**releases(device), "deepspeed": deepspeed.__version__, "kind": repr(kind), "code": digest_of_sources()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path) -> tuple[Verdict, dict[str, str]] | None:
    """None if there is no such file, or something else in it."""
    try:
        return _FILE.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError):
        return None


# ---- running the kernels ----------------------------------------------------------------------------------------


def _run(kind: Kind, device: torch.device) -> Verdict:
    plain = kind._replace(recipe=unquantized(kind.recipe))
    try:
        _run_kernels(plain, device)
    except Exception as error:  # whatever a compiler or a kernel raises
        return Verdict("deepspeed", _said(error))
    try:
        if kind != plain:
            _run_kernels(kind, device)
    except Exception as error:
        return Verdict("bf16", _said(error))
    return Verdict()


def _said(error: BaseException) -> str:
    """The error's text. Of a kernel that does not compile, its name and the last line of the first error."""
    if isinstance(error, CheckFailed):
        return str(error)
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    lines = str(chain[-1]).strip().splitlines()
    text = f"{type(chain[-1]).__name__}: {lines[-1] if lines else 'no text'}"
    for one in chain:
        quoted = re.match(r"\s*def (\w+)", str(getattr(one, "src", "")))  # by the compiler
        kernels = [quoted[1]] if quoted else [launched.fn.__name__ for frame, _ in walk_tb(one.__traceback__)
                                              if hasattr(launched := frame.f_locals.get("self"), "remembers")]
        if kernels:
            return f"kernel {kernels[-1]} does not compile or start: {text}"
    return text


def _run_kernels(kind: Kind, device: torch.device) -> None:
    """Raises CheckFailed, or whatever a kernel raises."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        torch.manual_seed(20)
        with from_python():
            transport: Local | _Alone = _Alone() if kind.exchanges else Local()
            methods = ("dispatch", "combine") if kind.exchanges else ("plan", "dispatch", "combine")
            known = _run_ffn(kind, device, _running_twice(replace(transport), *methods), _CheckedFFN)
            if kind.stacked:
                summed = _run_ffn(kind, device, transport, summed=True)
                _compare("gradients that are added to sums", summed, known, float("inf"))  # the same bits
            # A token's result is that of its first copy. A weight's gradient is the sum over all copies, where other
            # rows share a scale if it is MXFP8.
            many = [x[:len(like)] if len(x) == WIDE_COPIES * len(like) else x / WIDE_COPIES
                    for x, like in zip(_run_ffn(kind, device, transport, copies=WIDE_COPIES), known, strict=True)]
            _compare("many rows", many, known, 20.0)
        for name in ("recorded launches", "replayed launches"):
            _compare(name, _run_ffn(kind, device, transport), known, float("inf"))


def _run_ffn(kind: Kind, device: torch.device, transport: Transport, ffn_class: type[ExpertFFN] = ExpertFFN,
             copies: int = 1, summed: bool = False) -> list[torch.Tensor]:
    """The output and all gradients for `copies` of the same tokens, with the same weights in every call.

    Expert 1 gets no token, and the others different numbers of them. `summed`: doubles of the weights' gradients are
    added to sums of 0.
    """
    torch.manual_seed(21)
    formula, leaves = kind.formula, []

    def leaf(x: torch.Tensor) -> torch.Tensor:
        leaves.append(x.clone().requires_grad_())
        return leaves[-1]

    def randn(*shape: int) -> torch.Tensor:
        size = 1 if len(shape) == 2 else shape[-1]**-0.5  # biases are as large as rows
        return (size * torch.randn(*shape)).to(device, kind.dtype)

    def tokens(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.to(device, dtype).repeat(copies, 1)

    x_TH = leaf(tokens(torch.randn(TOKENS, HIDDEN), kind.dtype))
    g_TH = tokens(torch.randn(TOKENS, HIDDEN), kind.dtype)
    weight_TK = leaf(tokens(torch.rand(TOKENS, CHOICES)))
    second = torch.where(torch.arange(TOKENS) % 5 < 3, 2, 3)
    expert_TK = tokens(torch.stack([torch.zeros_like(second), second], dim=1))
    weights = {role: randn(EXPERTS, *shape) for role, shape in formula.shapes().items()}
    frozen = None
    if kind.frozen and kind.recipe.quantize_gemm:
        frozen = FORMATS[kind.frozen](EXPERTS, HIDDEN, FFN, kind.dtype, device)
        for i, parts in enumerate(zip(*(weights.pop(role) for role in ("gate", "down", "up")), strict=True)):
            frozen.put(i, *parts, kind.recipe.scaling_mode)
    weights = {role: leaf(w) if kind.stacked else [leaf(one) for one in w] for role, w in weights.items()}
    adapters = {}
    if kind.rank:
        ups = (FFN if formula.kind == "mlp" else 2 * FFN), HIDDEN
        adapters = {name: LowRank(leaf(randn(EXPERTS, kind.rank, width)), leaf(randn(EXPERTS, out, kind.rank)))
                    for name, (out, width) in {"up": ups, "down": (HIDDEN, FFN)}.items()}
    # In the order of ZeRO's sums, where the one of `down` lies between the other two.
    stacks = [weights[role] for role in ("gate", "down", "up") if summed and role in weights]
    flat = torch.zeros(sum(w.numel() for w in stacks), dtype=kind.dtype, device=device)
    parts = zip(stacks, flat.split([w.numel() for w in stacks]), strict=True)
    sums = {id(w): Sum(part.view(w.shape), True, 2.0) for w, part in parts}
    ffn = ffn_class(formula, kind.recipe, transport, EXPERTS, name="the check of ds_mxfp8_moe's kernels",
                    sum_of=lambda w, node: sums.get(id(w)), merge_aware=kind.merges)
    y_TH = ffn(x_TH, Routes(expert_TK=expert_TK, weight_TK=weight_TK, num_experts=EXPERTS), weights,
               adapters=adapters, frozen=frozen)
    y_TH.backward(g_TH)
    return [y_TH.detach(), *(sums[id(one)].out_ENK / 2 if id(one) in sums else one.grad for one in leaves)]


@dataclass(frozen=True)
class _Alone(Collective):
    """An exchange of one rank with itself, by the kernels of the transports that send messages."""

    group: ProcessGroup | None = None
    world_size = 1

    def _exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, phase: str) -> torch.Tensor:
        return x.clone()

    def _read_counts(self, counts: torch.Tensor, meanwhile: Callable[[], None]) -> list:
        meanwhile()
        return counts.tolist()

    def _where(self, phase: str) -> str:
        return phase


# ---- comparing with plain torch -----------------------------------------------------------------------------------


def _run_twice(name: str, on_gpu: Callable, on_cpu: Callable, *args, **kwargs) -> Any:
    """The result on the GPU, compared with plain torch's on the CPU."""
    host_args, host_kwargs = mapped((args, kwargs), _on_host)  # before the first run, which may change its arguments
    found = on_gpu(*args, **kwargs)
    get_accelerator().synchronize()  # an error of a kernel belongs to this step
    _compare(name, found, on_cpu(*host_args, **host_kwargs))
    return found


def _running_twice(transport: Transport, *methods: str) -> Transport:
    """The transport, which runs these of its methods twice from now on."""
    for name in methods:
        method = getattr(transport, name)
        vars(transport)[name] = partial(_run_twice, name, method, method)
    return transport


@dataclass(frozen=True)
class _CheckedMath(ExpertMath):
    """Runs each public method twice.

    Methods call one another. On the CPU, the inner calls of a method return what they returned on the GPU. So each
    kernel is compared from the inputs that it had, and permitted differences do not add up.

    Attributes:
        results: copies on the CPU of what the calls have returned.
        on_cpu: whether calls return the next of the results instead.
    """

    results: list = field(default_factory=list, compare=False)
    on_cpu: bool = False

    def step(self, method: Callable, *args, **kwargs) -> Any:
        """The result of a method of ExpertMath."""
        if self.on_cpu:
            return self.results.pop(0)
        inner = replace(self, results=[])
        found = _run_twice(method.__name__, partial(method, inner), partial(method, replace(inner, on_cpu=True)),
                           *args, **kwargs)
        self.results.append(mapped(found, _on_host))
        return found


for _name, _method in vars(ExpertMath).items():
    if isfunction(_method) and not _name.startswith("_"):
        setattr(_CheckedMath, _name, partialmethod(_CheckedMath.step, _method))


class _CheckedFFN(ExpertFFN):

    def math(self, dtype: torch.dtype) -> ExpertMath:
        return _CheckedMath(self.formula, self.recipe, dtype)


def _compare(name: str, found: Any, expected: Any, least_db: float = LEAST_DB) -> None:
    """Compares the tensors of two trees. MXTensors are dequantized."""
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    for i, (x, y) in enumerate(pairs):
        x, y = plain(_on_host(x).float()), plain(_on_host(y).float())
        where = name if len(pairs) == 1 else f"{name}, tensor {i} of {len(pairs)}"
        if x.shape != y.shape:
            raise CheckFailed(f"{where} is {tuple(x.shape)}, and plain torch's {tuple(y.shape)}")
        decibel = sqnr_db(y, x)
        if not decibel >= least_db:  # NaN too
            raise CheckFailed(f"{where}: signal-to-noise ratio {decibel:.1f} dB, expected {least_db:.0f} or more")


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    return x.detach().to("cpu", copy=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(tree, found.append)
    return found
