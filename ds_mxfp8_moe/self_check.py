# SPDX-License-Identifier: Apache-2.0
"""A check at first use: every kernel that an engine's layers will launch runs once on a small case.

Compilers have bugs, and a new release, chip or driver may bring one that makes gradients wrong without an error. So
the first engine on a chip with these releases runs a small expert FFN, forward and backward. Each operation of it runs
twice: on the GPU by its kernels, and on the CPU in plain torch, from the same inputs. If one of them raises an error,
or differs from plain torch, the layers that need it run without MXFP8, and if that fails as well, on DeepSpeed's path.
The verdict is remembered in a file beside Triton's cache: later engines on the same chip, with the same releases and
the same kernels, read it in a millisecond. The key "self_check" switches all of this off.

CUDA's kernels of the transport nvlink, which nvcc compiles, are not part of it.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.ep_router import TokenChoiceTopKRouter

from . import casts, expert_ffn, expert_math, router
from .autoep import MXFP8AutoEPMoELayer
from .config import Recipe
from .expert_ffn import ExpertFFN, unquantized
from .experts import ExpertFormula, LowRank
from .layer import MXFP8MOELayer
from .mx import MXTensor
from .routing import Routes
from .transport import Transport
from .transport.collective import Collective
from .transport.local import Local

# What runs twice, by the module in which its callers look it up.
OPERATIONS = {
    casts: ("quantize", "quantize_columns", "quantize_both", "rescale_columns", "dequantize", "quantize_weights"),
    expert_math: ("activate", "activate_backward", "add_weighted_bias", "group_sums", "grouped_mm",
                  "grouped_mm_weights", "grouped_mm_wgrad", "grouped_mm_wgrad_rows"),
    Collective: ("dispatch", "combine"),
    Local: ("plan", "dispatch", "combine"),
}
# Least signal-to-noise ratio of a kernel's result, in dB. Kernels give 45 and more where they do not give the same
# bits: float32 sums in another order, rounded once to bf16. One wrong tile in a hundred gives 20.
LEAST_DB = 35.0
HIDDEN, FFN, EXPERTS, CHOICES = 256, 384, 4, 2
TOKENS, WIDE_COPIES = 200, 36  # copies: so that GEMMs take the tiles for many rows


class Kind(NamedTuple):
    """What a layer's kernels depend on. Layers of the same kind share a check.

    Attributes:
        formula: with the sizes of the check and without names.
        stacked: whether the weights of all experts are one tensor.
        rank: of the adapters of both GEMMs. 0: there are none.
        exchanges: whether rows travel to other ranks.
        routed: whether the router is AutoEP's, with these properties: score_func, route_norm, and whether a bias acts
            on the choice of experts.
    """

    formula: ExpertFormula
    recipe: Recipe
    dtype: torch.dtype
    stacked: bool
    rank: int
    exchanges: bool
    routed: tuple | None


class Verdict(NamedTuple):
    """What a check found for a kind.

    Attributes:
        runs: "all", "bf16" (without MXFP8) or "deepspeed".
        found: what is wrong. "": nothing.
    """

    runs: str = "all"
    found: str = ""


ORDER = ("all", "bf16", "deepspeed")  # from good to bad


class CheckFailed(Exception):
    """A kernel's result differs from plain torch's."""


def kinds_of(layers: Iterable[MXFP8MOELayer | MXFP8AutoEPMoELayer]) -> set[Kind]:
    """The kinds of converted layers."""
    found = set()
    for layer in layers:
        settings, stacked, routed = layer.mxfp8_settings, isinstance(layer, MXFP8AutoEPMoELayer), None
        if stacked and type(layer.router) is TokenChoiceTopKRouter and layer.router.num_expert_groups is None:
            biased = layer.expert_bias is not None or layer.router.e_score_correction_bias is not None
            routed = layer.router.score_func, layer.router.route_norm, biased
        dtype = next(p.dtype for p in layer.experts.parameters())
        found.add(kind_of(settings.formula, settings.recipe, dtype, stacked=stacked, exchanges=layer.ep_size > 1,
                          rank=8 if hasattr(layer, "expert_adapters") else 0, routed=routed))
    return found


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that all layers follow."""
    return max(verdicts, key=lambda verdict: ORDER.index(verdict.runs), default=Verdict())


def kind_of(formula: ExpertFormula, recipe: Recipe, dtype: torch.dtype, *, stacked: bool = True, rank: int = 0,
            exchanges: bool = False, routed: tuple | None = None) -> Kind:
    """The kind of a layer with this formula."""
    formula = formula.halved()
    names = {role: role for role in formula.names()}
    ffn = HIDDEN if formula.kind == "linear" else FFN
    return Kind(replace(formula, hidden_size=HIDDEN, ffn_size=ffn, **names), recipe, dtype, stacked, rank, exchanges,
                routed)


def check(kind: Kind, device: torch.device) -> Verdict:
    """The verdict about a kind on a GPU: a remembered one, else by running the kernels."""
    path = _folder() / f"{_digest(kind, device)}.json"
    try:
        return _read(path)[0]
    except (OSError, ValueError, KeyError):
        pass
    verdict = _run(kind, device)
    record = {**verdict._asdict(), "releases": releases(device)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(record))
        unfinished.replace(path)  # ranks write the same file
    except OSError:
        pass  # not remembered: the next engine checks again
    return verdict


def line_about(verdict: Verdict, device: torch.device) -> str:
    """The start-up line about a verdict that is not good."""
    from .ops.triton_kernels.launcher import RELEASES  # Triton exists on Linux alone
    how = "run in bf16" if verdict.runs == "bf16" else "run DeepSpeed's own path"
    here = ", ".join(f"{name} {value}" for name, value in releases(device).items())
    return (f"mxfp8_moe: WARNING: MoE layers {how}, since a kernel is broken here: {verdict.found}. Here: {here}. "
            f"Tested with Triton {RELEASES[0]} to {RELEASES[-1]}")


def releases(device: torch.device) -> dict[str, str]:
    """The chip, and the releases that make its code."""
    import triton
    return {"chip": torch.cuda.get_device_name(device), "driver": _driver(), "triton": triton.__version__,
            "ptxas": triton.knobs.nvidia.ptxas.version, "torch": torch.__version__}


def _driver() -> str:
    """The release of NVIDIA's driver, as Linux shows it."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[0] if found else "unknown"


def _run(kind: Kind, device: torch.device) -> Verdict:
    try:
        _run_kernels(kind._replace(recipe=unquantized(kind.recipe)), device)
    except Exception as error:  # whatever a compiler or a kernel raises
        return Verdict("deepspeed", _said(error))
    if kind.recipe == unquantized(kind.recipe):
        return Verdict()
    try:
        _run_kernels(kind, device)
    except Exception as error:
        return Verdict("bf16", _said(error))
    return Verdict()


def _said(error: Exception) -> str:
    """The error's first line. Of a kernel that does not compile also its name."""
    if isinstance(error, CheckFailed):
        return str(error)
    chain, deepest = [], error
    while deepest is not None:
        chain.append(deepest)
        deepest = deepest.__cause__ or deepest.__context__
    kernel = next((name for one in chain if (name := _kernel_in(one))), None)
    lines = str(chain[-1]).strip().splitlines()
    text = f"{type(chain[-1]).__name__}: {lines[-1] if lines else 'no text'}"
    return f"kernel {kernel} does not compile or start: {text}" if kernel else text


def _kernel_in(error: BaseException) -> str | None:
    """The outermost kernel function in the traceback of an error, or in the source that the compiler quotes."""
    quoted = getattr(error, "src", None)
    if isinstance(quoted, str) and quoted.lstrip().startswith("def "):
        return quoted.lstrip().removeprefix("def ").partition("(")[0]
    frame, found = error.__traceback__, None
    while frame is not None:
        if (launched := frame.tb_frame.f_locals.get("self")) is not None and hasattr(launched, "remembers"):
            found = launched.fn.__name__
        frame = frame.tb_next
    return found


# ---- running the kernels ----------------------------------------------------------------------------------------


def _run_kernels(kind: Kind, device: torch.device) -> None:
    """Raises CheckFailed, or whatever a kernel raises."""
    with torch.random.fork_rng(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        torch.manual_seed(20)
        case = _Case(kind, device)
        with _compared():
            if kind.routed is not None:
                _compare_router(kind, device)
            known = case.run(1, recorded=False)
        for name in ("recorded launches", "replayed launches"):
            _compare(name, case.run(1, recorded=True), known, float("inf"))  # the same bits
        many = case.run(WIDE_COPIES, recorded=False)
        # Other rows share a scale where weight gradients are MXFP8.
        _compare("many rows", [_of_one_copy(x, like) for x, like in zip(many, known, strict=True)], known, 20.0)


def _of_one_copy(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A token's result is that of its first copy. A weight's gradient is the sum over all copies."""
    return x[:len(like)] if len(x) == WIDE_COPIES * len(like) else x / WIDE_COPIES


class _Case:
    """Tokens, routes and weights of a kind. Expert 1 gets no token, and the others different numbers of them."""

    def __init__(self, kind: Kind, device: torch.device):
        self.kind, self.device = kind, device
        formula, dtype = kind.formula, kind.dtype

        def randn(*shape: int, by: float = 1.0) -> torch.Tensor:
            return (by * torch.randn(*shape)).to(device, dtype)

        self.x_TH, self.g_TH = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN)
        self.weight_TK = torch.rand(TOKENS, CHOICES).to(device)
        second = torch.where(torch.arange(TOKENS) % 5 < 3, 2, 3)
        self.expert_TK = torch.stack([torch.zeros(TOKENS, dtype=torch.long), second], dim=1).to(device)
        self.weights = {role: randn(EXPERTS, *shape, by=shape[-1]**-0.5) for role, shape in formula.shapes().items()}
        self.adapters = {}
        if kind.rank:
            ups = (FFN if formula.kind == "mlp" else 2 * FFN), HIDDEN
            self.adapters = {name: LowRank(randn(EXPERTS, kind.rank, width, by=width**-0.5),
                                           randn(EXPERTS, out, kind.rank, by=kind.rank**-0.5))
                             for name, (out, width) in {"up": ups, "down": (HIDDEN, FFN)}.items()}

    def run(self, copies: int, recorded: bool) -> list[torch.Tensor]:
        """The output and all gradients for `copies` of the tokens."""
        kind = self.kind
        ffn = ExpertFFN(kind.formula, kind.recipe, _Alone() if kind.exchanges else Local(), EXPERTS,
                        name="the check of ds_mxfp8_moe's kernels")

        def leaf(x: torch.Tensor) -> torch.Tensor:
            return x.detach().clone().requires_grad_()

        x_TH, weight_TK = leaf(self.x_TH.repeat(copies, 1)), leaf(self.weight_TK.repeat(copies, 1))
        routes = Routes(expert_TK=self.expert_TK.repeat(copies, 1), weight_TK=weight_TK, num_experts=EXPERTS)
        weights = {role: leaf(w) if kind.stacked else [leaf(one) for one in w] for role, w in self.weights.items()}
        adapters = {name: LowRank(leaf(a), leaf(b)) for name, (a, b) in self.adapters.items()}
        with ExitStack() as stack:
            if not recorded:
                stack.enter_context(_put(expert_ffn, "executor_for", lambda device: None))
            y_TH = ffn(x_TH, routes, weights, adapters=adapters)
            y_TH.backward(self.g_TH.repeat(copies, 1))
        leaves = [x_TH, weight_TK, *(w for ws in weights.values() for w in ([ws] if kind.stacked else ws)),
                  *(factor for factors in adapters.values() for factor in factors)]
        return [y_TH.detach(), *(one.grad for one in leaves)]


@dataclass(frozen=True)
class _Alone(Collective):
    """An exchange of one rank with itself, by the kernels of the transports that send messages."""

    group: Any = None
    world_size = 1

    def _exchange(self, x: torch.Tensor, send_splits: tuple, recv_splits: tuple, phase: str) -> torch.Tensor:
        return x.clone()

    def _read_counts(self, counts: torch.Tensor, meanwhile: Callable[[], None]) -> list:
        meanwhile()
        return counts.tolist()

    def _where(self, phase: str) -> str:
        return phase


def _compare_router(kind: Kind, device: torch.device) -> None:
    score_func, route_norm, biased = kind.routed
    plain = TokenChoiceTopKRouter(HIDDEN, 16, None, None, CHOICES, score_func, route_norm, 1.0, False)
    own = TokenChoiceTopKRouter(HIDDEN, 16, None, None, CHOICES, score_func, route_norm, 1.0, False)
    own.load_state_dict(plain.state_dict())
    own, x_TH, upstream = own.to(device), torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, CHOICES)
    bias_E = torch.randn(16) / 100 if biased else None
    results = []
    for one, where in ((own, device), (plain, torch.device("cpu"))):
        x = x_TH.to(where).requires_grad_()
        weight_TK, expert_TK, _ = router.route(one, x, None if bias_E is None else bias_E.to(where))
        (weight_TK * upstream.to(where)).sum().backward()
        results.append([weight_TK.detach(), expert_TK.float(), x.grad, one.gate.weight.grad])
    _compare("the router", *results)


# ---- comparing with plain torch -----------------------------------------------------------------------------------


@contextmanager
def _compared() -> Iterator[None]:
    """Inside the context, operations on a GPU are compared with plain torch on the CPU."""
    with ExitStack() as stack:
        for owner, names in OPERATIONS.items():
            for name in names:
                stack.enter_context(_put(owner, name, _comparing(getattr(owner, name), name)))
        yield


@contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute for a time."""
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _comparing(operation: Callable, name: str) -> Callable:

    @wraps(operation)
    def both(*args, **kwargs):
        found = operation(*args, **kwargs)
        if _on_gpu((args, kwargs)):
            get_accelerator().synchronize()  # an error of the kernel belongs to this operation
            expected = operation(*_on_host(args), **_on_host(kwargs))
            _compare(name, list(_tensors(found)), list(_tensors(expected)))
        return found

    return both


def _on_gpu(x: Any) -> bool:
    return any(one.is_cuda for one in _tensors(x))


def _compare(name: str, found: list[torch.Tensor], expected: list[torch.Tensor], least_db: float = LEAST_DB) -> None:
    for x, y in zip(found, expected, strict=True):
        x, y = _values(x), _values(y)
        if x.shape != y.shape:
            raise CheckFailed(f"{name} returns {tuple(x.shape)}, and plain torch {tuple(y.shape)}")
        decibel = _decibel(x, y)
        if decibel < least_db:
            raise CheckFailed(f"{name}: signal-to-noise ratio {decibel:.1f} dB, expected {least_db:.0f} or more")


def _decibel(x: torch.Tensor, y: torch.Tensor) -> float:
    if torch.equal(x, y):
        return float("inf")
    noise = (x - y).double().square().sum()
    ratio = 10 * torch.log10(y.double().square().sum() / noise)
    return -float("inf") if ratio.isnan() else ratio.item()


def _values(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, in float32."""
    x = _to_host(x)
    return (x.dequantize(torch.float32) if isinstance(x, MXTensor) else x).float()


def _to_host(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, MXTensor):
        return x.with_parts(x.qdata.cpu(), x.scale_bytes.cpu())
    return x.detach().cpu()


def _on_host(x: Any) -> Any:
    return _mapped(x, _to_host)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(x, found.append)
    return iter(found)


def _mapped(x: Any, change: Callable) -> Any:
    """x with `change` applied to every tensor inside it."""
    if isinstance(x, torch.Tensor):
        return change(x)
    if isinstance(x, dict):
        return {key: _mapped(value, change) for key, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_mapped(one, change) for one in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_mapped(one, change) for one in x)
    if is_dataclass(x) and not isinstance(x, (type, Transport, Recipe)):
        return replace(x, **{one.name: _mapped(getattr(x, one.name), change) for one in fields(x)})
    return x


# ---- remembering ----------------------------------------------------------------------------------------------------


def _folder() -> Path:
    import triton
    return Path(triton.knobs.cache.dir) / "ds_mxfp8_moe"


def _digest(kind: Kind, device: torch.device) -> str:
    """Of all that a verdict depends on: the kind, the chip and the releases, and the package's own code."""
    package = Path(__file__).parent
    code = hashlib.sha256()
    for path in sorted([*package.glob("*.py"), *package.glob("transport/*.py"), *package.glob("ops/**/*.py")]):
        code.update(path.read_bytes())
    facts = {**releases(device), "deepspeed": deepspeed.__version__, "kind": repr(kind), "code": code.hexdigest()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def remembered(device: torch.device) -> list[Verdict]:
    """All verdicts about this chip with these releases."""
    found, here = [], releases(device)
    for path in sorted(_folder().glob("*.json")) if _folder().is_dir() else ():
        try:
            verdict, of = _read(path)
        except (OSError, ValueError, KeyError):
            continue
        found += [verdict] if of == here else []
    return found


def _read(path: Path) -> tuple[Verdict, dict]:
    record = json.loads(path.read_text())
    return Verdict(record["runs"], record["found"]), record["releases"]
