# SPDX-License-Identifier: Apache-2.0
"""150 damaged checkpoints. from_pretrained reads the values of the whole one, or those that transformers reads from
the damaged one. Or it raises an error that names a tensor, a file or a key."""

import json
import random
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ds_mxfp8_moe import from_pretrained
from ds_mxfp8_moe.compute.mx import dequantize
from tests.support.autoep_models import ds_config
from tests.support.from_pretrained_cases import held, operands
from tests.support.frozen_checkpoints import change_config, tensors_of, write

KINDS = [("qwen3_moe", "bf16"), ("qwen3_moe", "ue8m0"), ("mixtral", "float"), ("gpt_oss", "bf16"),
         ("gpt_oss", "mxfp4")]
DTYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
NAMES = re.compile(r"experts|\.(weight|bias)|_(proj|bias)|\.safetensors|config\.json|quantiz|quant_method|"
                   "weight_block_size")
INDEX = "model.safetensors.index.json"


def shard(directory, rng):
    return rng.choice(sorted(directory.glob("*.safetensors")))


def cut(directory, rng):
    file = shard(directory, rng)
    data = file.read_bytes()
    file.write_bytes(data[:rng.choice([0, 7, 8, 100, len(data) // 2, len(data) - 1])])


def flip_in_header(directory, rng):
    flip(directory, rng, 0, 8 + 300)


def flip_in_data(directory, rng):
    flip(directory, rng, -20000, None)


def flip(directory, rng, first, last):
    file = shard(directory, rng)
    data = bytearray(file.read_bytes())
    data[rng.choice(range(len(data))[first:last])] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def change_tensor(directory, rng, change):
    """`change`: takes a tensor's name and the tensor, and returns what the file has in its place."""
    file = shard(directory, rng)
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensors |= (changed := change(name, tensors.pop(name)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return changed


def miss(directory, rng):
    change_tensor(directory, rng, lambda name, tensor: {})


def rename(directory, rng):
    change = rng.choice([lambda name: f"{name}x", lambda name: name.replace(".", "{0.x}.", 3), str.upper,
                         lambda name: f"x.{name}", lambda name: re.sub(r"experts\.\d+", "experts.17", name)])
    change_tensor(directory, rng, lambda name, tensor: {change(name): tensor})


def add(directory, rng):
    change = rng.choice([lambda name: re.sub(r"experts\.\d+", "experts{}.3", name), lambda name: f"{name}_scale_inv",
                         lambda name: re.sub(r"experts\.\d+", "experts.8", name), lambda name: f"{name}_blocks"])
    change_tensor(directory, rng, lambda name, tensor: {name: tensor, change(name): tensor.clone()})


def duplicate(directory, rng):
    [(name, tensor)] = change_tensor(directory, rng, lambda name, tensor: {name: tensor}).items()
    other = next(file for file in sorted(directory.glob("*.safetensors")) if name not in load_file(file))
    save_file({**load_file(other), name: tensor.view(torch.uint8).bitwise_not().view(tensor.dtype)}, other,
              metadata={"format": "pt"})


def other_dtype(directory, rng):
    dtype = rng.choice(DTYPES)
    change_tensor(directory, rng, lambda name, tensor: {name: tensor.float().to(dtype)})


def other_shape(directory, rng):
    change = rng.choice([lambda x: x[None], lambda x: x.flatten(), lambda x: x.flatten()[0].clone(), lambda x: x[:0],
                         lambda x: x[:len(x) // 2], lambda x: torch.cat([x, x]), lambda x: x.mT if x.dim() > 1 else x])
    change_tensor(directory, rng, lambda name, tensor: {name: change(tensor)})


def bad_index(directory, rng):
    path = directory / INDEX
    index = json.loads(path.read_text())
    name = rng.choice(sorted(index["weight_map"]))
    file = rng.choice([5, None, "../x.safetensors", "/x.safetensors", "config.json", "none.safetensors", ""])
    path.write_text(rng.choice(["", "{", "null", "[]", "7", "{}", "\0", '{"weight_map": null}', '{"weight_map": {}}',
                                '{"weight_map": ["a"]}', *[json.dumps(index | {"weight_map": {
                                    **index["weight_map"], name: file}})] * 7]))


def bad_quantization(directory, rng):
    change_config(directory, quantization_config=rng.choice([
        [], 0, "fp8", {}, None, {"quant_method": None}, {"quant_method": "none"}, {"quant_method": 3},
        {"quant_method": "fp8", "weight_block_size": 0}, {"quant_method": "fp8", "weight_block_size": [0, 0]},
        {"quant_method": "mxfp4"}, {"quant_method": "mxfp4", "modules_to_not_convert": 5},
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "compressed-tensors"}]))


DAMAGES = [cut, flip_in_header, flip_in_data, miss, rename, add, duplicate, other_dtype, other_shape, bad_index,
           bad_quantization]


def values(net) -> dict[str, torch.Tensor]:
    """All of a model's values in float32. Experts are [E, N, K]."""
    found = {name: p.detach().float() for name, p in net.state_dict().items()}
    for name, module in held(net).items():
        for gemm, mx in zip(("gate_up_proj", "down_proj"), operands(module, 0, 8).values(), strict=True):
            found[f"{name}.{gemm}"] = dequantize(mx, torch.float32)
    return found


def read_by_transformers(directory, like) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The values in the order of `like`, and the names of those that the checkpoint lacks."""
    net, info = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    found = {name: p.detach().float() for name, p in net.state_dict().items()}
    for name, x in found.items():
        if name in like and x.dim() == 3 and net.config.model_type == "gpt_oss":
            rows = x.mT
            found[name] = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1) if "gate_up" in name else rows
    return found, set(info["missing_keys"])


def same(x: torch.Tensor, y: torch.Tensor, is_expert: bool) -> bool:
    """Experts may be rounded to e4m3."""
    if not is_expert:
        return torch.equal(x.nan_to_num(), y.nan_to_num())
    within = 2**-3 * y.abs() + 2**-8 * y.nan_to_num(posinf=0, neginf=0).abs().amax()
    return bool(((x - y).abs() <= within).logical_or(~y.isfinite()).all())


@pytest.mark.slow
@pytest.mark.parametrize("family, kind", KINDS)
def test_damaged_checkpoints(tmp_path, family, kind):
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rng, config = random.Random(61), ds_config({"enabled": True}, ep_size=1)
    write(tmp_path / "whole", family, kind, num_hidden_layers=1, **(
        {"layer_types": ["full_attention"]} if family == "gpt_oss" else {}))
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1 and tensors_of(tmp_path / "whole")
    whole, read, problems = values(from_pretrained(tmp_path / "whole", config)), 0, []
    for i in range(30):
        damage, directory = DAMAGES[i % len(DAMAGES)], tmp_path / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", directory)
        damage(directory, rng)
        try:
            found = values(from_pretrained(directory, config))
        except (RuntimeError, ValueError, TypeError, OSError, ImportError) as error:
            if not NAMES.search(str(error).replace(str(tmp_path), "")):
                problems.append((i, damage.__name__, repr(error)))
            continue
        except Exception as error:
            problems.append((i, damage.__name__, repr(error)))
            continue
        read += 1
        if found.keys() != whole.keys() or not all(same(found[name], whole[name], False) for name in whole):
            plain, missing = read_by_transformers(directory, whole)
            wrong = [name for name in whole if name not in missing and not same(
                found[name], plain[name], "experts" in name and found[name].dim() == 3)]
            problems += [(i, damage.__name__, wrong)] if wrong else []
    assert not problems
    assert 3 < read < 27
