# SPDX-License-Identifier: Apache-2.0
"""Finetunes a Hugging Face checkpoint of every family that AutoEP has a preset for, in bf16 and in MXFP8.

Every run is examples/gpt_moe/train.py, started by the `deepspeed` launcher on all GPUs, or on two CPU ranks over gloo.
There, train.py uses float32 instead of bf16 if the CPU has no bf16 instructions. Both finetunings of a family start
from the same checkpoint and see the same data in the same order. Plain DeepSpeed then resumes the checkpoint of the
MXFP8 run, and transformers reads what it saved. A family without a folder in --checkpoints gets a small model with
random weights, built from its config.
"""

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS, resolve_preset_candidates
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

import data
import train
from arguments import one_or_more
from finetune import CONFIGS, ranks, train_command

# How far two losses of the same weights and text may be apart, as a share of the loss. If both are in bf16: the
# rounding of one number, though a loss is the mean over thousands of tokens. If one is in MXFP8: also the three bits
# of e4m3.
BF16_ROUNDING = 2**-9
MXFP8_ROUNDING = 0.01


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    on_cpu = get_accelerator().device_name() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", metavar="NAME", default=[*PRESET_MODELS], help="presets of AutoEP, or "
                        f"model types of transformers (default: {' '.join(PRESET_MODELS)})")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="holds Hugging Face checkpoints in "
                        "folders named by their model type; a family without one gets one built from its config")
    parser.add_argument("--out", type=Path, default=Path("runs/presets"), help="folder of the runs")
    parser.add_argument("--steps", type=one_or_more, default=30, help="optimizer steps of each finetuning")
    parser.add_argument("--hidden_size", type=one_or_more, default=128 if on_cpu else 512,
                        help="of models built here")
    parser.add_argument("--layers", type=one_or_more, default=2 if on_cpu else 4, help="of models built here")
    parser.add_argument("--experts", type=one_or_more, default=8 if on_cpu else 16, help="of models built here")
    parser.add_argument("--seq_len", type=one_or_more, default=64 if on_cpu else 512, help="tokens per sequence")
    parser.add_argument("--data", default="pydoc", help="the text, as in train.py")
    parser.add_argument("--freeze", metavar="PATTERN", help="parameters that are not trained, as in train.py")
    parser.add_argument("--deepspeed_config", type=Path, default=CONFIGS / "ds/autoep_zero2.json", help="of all runs; "
                        'a section "mxfp8_moe" is used for the MXFP8 run')
    parser.add_argument("--zero_stage", type=int, choices=range(4), help="instead of the config's")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(arguments)
    unknown = set(args.presets) - {*PRESET_MODELS, *families()}
    if unknown:
        parser.error(f"--presets {' '.join(sorted(unknown))}: this DeepSpeed has {', '.join(PRESET_MODELS)}")
    if args.checkpoints and not args.checkpoints.is_dir():
        parser.error(f"--checkpoints: there is no folder {args.checkpoints}")
    if not args.deepspeed_config.is_file():
        parser.error(f"--deepspeed_config: there is no file {args.deepspeed_config}")
    return args


def families() -> dict[str, str]:
    """Model type -> the preset for it."""
    return {kind: name for name, preset in PRESET_MODELS.items() for kind in preset.hf_model_types}


def why_not(model_type: str) -> str | None:
    """Why the installed transformers cannot finetune models of this type through AutoEP. None if it can."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "the installed transformers has no language model of this type"
    try:
        resolve_preset_candidates(AutoEPConfig(), AutoConfig.for_model(model_type))
    except ValueError as reason:
        return str(reason)
    return None


def small_config(model_type: str, hidden_size: int, layers: int, experts: int):
    """The family's own config with these sizes. Sizes that depend on them are set if the family has them."""
    known = AutoConfig.for_model(model_type)
    preset = PRESET_MODELS[families()[model_type]]
    heads = hidden_size // 32
    sizes = {name: hidden_size for name in ("intermediate_size", "moe_intermediate_size", "shared_intermediate_size",
                                            "shared_expert_intermediate_size", "dense_intermediate_size")}
    sizes |= {name: heads for name in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads",
                                       "linear_num_value_heads")}
    sizes |= {name: 32 for name in ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                    "linear_key_head_dim", "linear_value_head_dim")}
    sizes |= {"hidden_size": hidden_size, "num_hidden_layers": layers, preset.num_experts_attr: experts,
              preset.top_k_attr: 2, "vocab_size": data.VOCABULARY, "q_lora_rank": hidden_size // 2,
              "kv_lora_rank": hidden_size // 2, "first_k_dense_replace": 1,
              "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
              "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
              "initializer_range": hidden_size**-0.5}  # large enough for the experts to matter to the loss
    kinds = [*dict.fromkeys(getattr(known, "layer_types", None) or ())]
    if kinds:  # of attention, in turn
        sizes["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return AutoConfig.for_model(model_type, **{name: size for name, size in sizes.items() if hasattr(known, name)})


def build_checkpoint(model_type: str, folder: Path, args) -> None:
    """Saves a model of random weights in transformers' format."""
    torch.manual_seed(args.seed)
    config = small_config(model_type, args.hidden_size, args.layers, args.experts)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros in a new model, but not in a trained one
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)


def ds_configs(args) -> dict[str, Path]:
    """The DeepSpeed configs of the runs. They differ only in the section "mxfp8_moe"."""
    plain = json.loads(args.deepspeed_config.read_text())
    if args.zero_stage is not None:
        plain["zero_optimization"] = plain.get("zero_optimization", {}) | {"stage": args.zero_stage}
    # 0: MXFP8 in every layer, although experts get few tokens from these small batches.
    section = plain.pop("mxfp8_moe", {"enabled": True, "min_tokens_per_expert": 0})
    args.out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, config in {"bf16": plain, "mxfp8": {"mxfp8_moe": section, **plain}}.items():
        paths[name] = args.out / f"{name}.json"
        paths[name].write_text(json.dumps(config, indent=2))
    return paths


def launch(config: Path, save_dir: Path, bar: tqdm, *arguments: str) -> dict:
    """Runs train.py with its output in save_dir / output.txt, and advances `bar` by its steps. Returns its summary.

    Raises:
        RuntimeError: the run failed.
    """
    shutil.rmtree(save_dir, ignore_errors=True)
    save_dir.mkdir(parents=True)
    log, start = save_dir / "log.jsonl", bar.n
    with (train_command(config, save_dir, "--log_every", "1", *arguments) as (command, environment),
          (save_dir / "output.txt").open("w") as output):
        print(shlex.join(command), file=output, flush=True)
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            if log.is_file():
                bar.update(start + log.read_text().count("\n") - bar.n)
    if process.returncode:
        raise RuntimeError(f"failed: see {save_dir / 'output.txt'}")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return json.loads((save_dir / "summary.json").read_text()) | {
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows)}


@torch.no_grad()
def transformers_loss(folder: Path, run: argparse.Namespace, batch_size: int, world_size: int) -> float:
    """The held-out loss as `world_size` ranks of train.py compute it, with transformers alone: mean cross-entropy."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.to(get_accelerator().current_device_name())
    heldout = train.load_data(run, run.seq_len)[1]
    found = [train.losses(model, batch)[0].item() for rank in range(world_size)
             for batch in heldout.heldout_batches(batch_size, run.heldout_windows, rank, world_size)]
    return statistics.mean(found)


def finetune(model_type: str, configs: dict[str, Path], bar: tqdm, args, launch=launch) -> dict:
    """Finetunes one family and reads back what was saved.

    Returns:
        Held-out losses in nats per token: "before"; after "bf16" and "mxfp8"; and of the MXFP8 run's weights when
        "resumed" by plain DeepSpeed and in "transformers". Tokens per second. The numbers of layers and of converted
        layers.
    """
    out = args.out / model_type
    base = args.checkpoints and args.checkpoints / model_type
    if not base or not (base / "config.json").is_file():
        base = out / "base"
        build_checkpoint(model_type, base, args)
    common = ["--hf_model", str(base), "--seq_len", str(args.seq_len), "--data", args.data, "--seed", str(args.seed),
              "--warmup_steps", str(args.steps // 10), *(["--freeze", args.freeze] if args.freeze else [])]
    steps = ["--steps", str(args.steps)]
    bf16 = launch(configs["bf16"], out / "bf16", bar, *common, *steps)
    mxfp8 = launch(configs["mxfp8"], out / "mxfp8", bar, *common, *steps, "--save_pretrained", str(out / "finetuned"))
    resumed = launch(configs["bf16"], out / "resumed", bar, *common, "--steps", str(args.steps + 1), "--load_dir",
                     str(out / "mxfp8"))
    return {"layers": mxfp8["moe_layers"], "converted": mxfp8["layers_converted"], "before": bf16["heldout_before"],
            "bf16": bf16["heldout"], "mxfp8": mxfp8["heldout"], "resumed": resumed["heldout_before"],
            "transformers": transformers_loss(out / "finetuned", train.parse_args(common), mxfp8["micro_batch_size"],
                                              ranks()),
            "bf16_tokens_per_s": bf16["tokens_per_s"], "mxfp8_tokens_per_s": mxfp8["tokens_per_s"]}


def verdict(row: dict) -> str:
    """"ok", or what is wrong with a result of `finetune`."""

    def apart(a: str, b: str, share: float) -> bool:
        return not abs(row[a] / row[b] - 1) <= share  # true for NaN

    if not (row["bf16"] < row["before"] and row["mxfp8"] < row["before"]):
        return "does not learn"
    if apart("mxfp8", "bf16", MXFP8_ROUNDING if row["converted"] else 0):
        return "learns otherwise than bf16"
    if apart("resumed", "mxfp8", MXFP8_ROUNDING if row["converted"] else BF16_ROUNDING):
        return "plain DeepSpeed resumes elsewhere"
    if apart("transformers", "resumed", BF16_ROUNDING):
        return "another model in transformers"
    return "ok" if row["converted"] else "ok, on DeepSpeed's own path"


def table(rows: dict[str, dict | str]) -> str:
    """One line for each family. A family without a result shows the reason."""
    lines = []
    for kind, row in rows.items():
        name = [families()[kind], kind]
        if isinstance(row, str):
            lines.append([*name, *[""] * 9, row])
        else:
            lines.append([*name, f"{row['converted']} of {row['layers']}", row["before"], row["bf16"], row["mxfp8"],
                          f"{row['mxfp8'] / row['bf16'] - 1:+.2%}", row["resumed"], row["transformers"],
                          f"{row['bf16_tokens_per_s']:.0f}", f"{row['mxfp8_tokens_per_s']:.0f}", verdict(row)])
    headers = ["preset", "model type", "layers\nconverted", "loss\nbefore", "after\nbf16", "after\nMXFP8", "apart",
               "MXFP8's in\nDeepSpeed", "and in\ntransformers", "tokens/s\nbf16", "tokens/s\nMXFP8", "verdict"]
    return tabulate(lines, headers, floatfmt=".4f")


def main() -> None:
    args = parse_args()
    chosen = [kind for kind, preset in families().items() if {kind, preset} & set(args.presets)]
    configs = ds_configs(args)
    rows: dict[str, dict | str] = {}
    disable_progress_bar()  # of transformers, inside ours
    with tqdm(total=len(chosen) * (2 * args.steps + 1), unit="step",
              mininterval=1 if sys.stderr.isatty() else 30) as bar:
        for i, kind in enumerate(chosen):
            bar.set_description(kind)
            if reason := why_not(kind):
                rows[kind] = f"left out: {reason}"
            else:
                try:
                    rows[kind] = finetune(kind, configs, bar, args)
                except Exception as error:  # the other families still run
                    rows[kind] = f"{type(error).__name__}: {error}"
            bar.update((i + 1) * (2 * args.steps + 1) - bar.n)
    print(f"\nHeld-out losses in nats per token, {args.steps} steps on {ranks()} ranks\n{table(rows)}")
    sys.exit(any(not row.startswith("left out") if isinstance(row, str) else not verdict(row).startswith("ok")
                 for row in rows.values()))


if __name__ == "__main__":
    main()
