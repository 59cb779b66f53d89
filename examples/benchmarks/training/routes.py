# SPDX-License-Identifier: Apache-2.0
"""Which experts do tokens of real text choose? Loads of experts in each step of small models that are finetuned.

A model of bytes learns texts of all domains, with its router's auxiliary loss. From there it is finetuned on each
domain alone, without that loss, as transformers does by default. The load of the fullest rank follows for experts
that stay where they are, and with "expert_placement": "balanced", as it decides from the steps before.

    python examples/benchmarks/training/routes.py --size 50M    # on a GPU
    python examples/benchmarks/training/routes.py --out FILE    # a smaller model, on a CPU: 10 minutes
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch
import yaml
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpt_moe"))

import data
from ds_mxfp8_moe.engine.placement import EVERY, WINDOW, fullest, predicted
from lib import run, show, world
from training.convergence import ROOT, SIZES, Size

DOMAINS = data.SOURCES
RANKS, HOW = (2, 4, 8), ("fixed", "balanced")
SEQUENCES = 16  # of a step
PIECES = 2000  # of a domain's text, of 8 KiB
FINETUNED = 0.1  # learning rate of finetuning, of that before
APART, AVERAGED = 100, 20  # steps: drift is between two means over AVERAGED that lie APART
LEAST = 0.01  # load over the mean, added to each for its logarithm: experts may get nothing


def model_of(size: Size, experts: tuple[int, int] | None) -> nn.Module:
    """`experts`: how many, and how many of them a token chooses, which are then as wide together as the model's."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = yaml.safe_load((ROOT / size.model).read_text())
    if experts:
        width = config["moe_intermediate_size"] * config["num_experts_per_tok"] // experts[1]
        config |= {"num_experts": experts[0], "num_experts_per_tok": experts[1], "moe_intermediate_size": width}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, use_cache=False)).to(world.device())


def learn(model: nn.Module, texts: Sequence[data.Windows], steps: int, rate: float, balance: bool) -> tuple:
    """Trains on batches with equal parts of each text. Returns loads [L, S, E] and the last loss."""
    counts, gates = [], [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _gate, _tokens, out: counts.append(
        out[2].flatten().bincount(minlength=out[0].shape[-1]))) for gate in gates]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        tokens_BS = torch.cat([text.training_batch(0, step, SEQUENCES // len(texts), 0, 1) for text in texts])
        tokens_BS = tokens_BS.to(world.device())
        loss = model(input_ids=tokens_BS, labels=tokens_BS, output_router_logits=balance).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return torch.stack(counts).view(steps, len(gates), -1).transpose(0, 1).cpu(), loss.item()


def statistics(loads_SE: torch.Tensor) -> dict[str, float]:
    """Of the logarithms of loads, weighted by the loads: how far experts differ in the mean over steps (preference),
    how far each of them moves in APART steps (drift), and how far it differs between batches (noise)."""
    log_SE = (loads_SE / loads_SE.double().mean(1, keepdim=True) + LEAST).log()
    share_E = loads_SE.sum(0) / loads_SE.sum()

    def square(off_SE: torch.Tensor) -> float:
        return (off_SE.square() * share_E).sum(1).mean().item()

    noise = square(log_SE.diff(dim=0)) / 2
    mean_SE = log_SE.unfold(0, AVERAGED, 1).mean(2)
    drift = square(mean_SE[APART:] - mean_SE[:-APART]) - 2 * noise / AVERAGED
    mean_E = log_SE.mean(0)
    preference = square((mean_E - (mean_E * share_E).sum())[None])
    return {"preference": preference**0.5, "drift": max(drift, 0.0)**0.5, "noise": noise**0.5}


def rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    """Those of a domain, by layer."""
    size, texts = SIZES[args.size], {}
    for domain in DOMAINS:
        pieces, _ = data.split(data.documents(domain))
        texts[domain] = data.Windows(pieces[::math.ceil(len(pieces) / PIECES)], size.seq_len)
    model = model_of(size, args.experts)
    learn(model, [*texts.values()], args.base_steps, size.lr, balance=True)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for domain, text in texts.items():
        model.load_state_dict(weights)
        loads_LSE, loss = learn(model, [text], args.steps, FINETUNED * size.lr, balance=False)
        world.say(f"{domain}: loss {loss:.3f} after {args.steps} steps")
        case = {"size": args.size, "experts": model.config.num_experts, "top_k": model.config.num_experts_per_tok,
                "base_steps": args.base_steps, "steps": args.steps, "domain": domain}
        yield [{"case": {**case, "layer": layer}, "contender": "router", **figures_of(loads_SE),
                "loads": loads_SE.tolist(), "correct": math.isfinite(loss)}
               for layer, loads_SE in enumerate(loads_LSE)]


def figures_of(loads_SE: torch.Tensor) -> dict[str, float]:
    """With the fullest rank's load over the mean, on average over steps."""
    found, (steps, num_experts) = statistics(loads_SE), loads_SE.shape
    for ranks in RANKS:
        if num_experts % ranks == 0:
            fixed_SR = loads_SE[WINDOW:].view(-1, ranks, num_experts // ranks).sum(2).tolist()
            found[f"fixed_{ranks}"] = mean(map(fullest, fixed_SR))
            found[f"balanced_{ranks}"] = mean(map(fullest, predicted(range(steps), loads_SE.tolist(), ranks)))
    return {name: round(value, 4) for name, value in found.items()}


# ---- how results are shown ----------------------------------------------------------------------------------------


def sentences(result: dict) -> list[str]:
    by_domain: dict[str, list] = {}
    for row in result["rows"]:
        by_domain.setdefault(row["case"]["domain"], []).append(row)
    return [f"{domain}, mean over layers: " + ", ".join(f"{title} {mean(row[name] for row in found):.2f}"
                                                        for title, name, _ in FIGURES if name in found[0]) + "."
            for domain, found in by_domain.items()]


def plot(result: dict, pyplot) -> None:
    panels = {f"{n} ranks": {how: [100 * row[f"{how}_{n}"] - 100 for row in result["rows"]] for how in HOW}
              for n in RANKS if f"fixed_{n}" in result["rows"][0]}
    show.spans(pyplot, panels, "fullest rank above the mean, %")


FIGURES = [(name, name, "{:.2f}") for name in ("preference", "drift", "noise")] + [
    (f"{n} ranks {how}", f"{how}_{n}", "{:.2f}") for n in RANKS for how in HOW]
NOTE = (f"Preference: how far experts differ. Drift: how far an expert's load moves in {APART} steps. Noise: how far "
        "it differs between batches. All three: standard deviation of the loads' logarithms. Of ranks: the fullest "
        "one's load over the mean.")
SHOWN = show.Shown("routes", [], FIGURES, plot, wide=False, note=NOTE, sentences=sentences)


def main() -> None:
    parser = run.parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--experts", nargs=2, type=run.one_or_more, metavar=("N", "K"),
                        help="N experts, of which a token chooses K (default: the model's)")
    parser.add_argument("--base_steps", type=run.one_or_more, default=600)
    parser.add_argument("--steps", type=run.one_or_more, default=WINDOW + 2 * EVERY,
                        help="on each domain (default: %(default)s)")
    run.main(SHOWN, parser, rows, alone=True)


if __name__ == "__main__":
    main()
