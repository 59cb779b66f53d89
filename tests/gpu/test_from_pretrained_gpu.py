# SPDX-License-Identifier: Apache-2.0
"""Models that from_pretrained reads onto a GPU through pinned buffers, beside those on a CPU."""

import pytest
import torch

from ds_mxfp8_moe import from_pretrained
from ds_mxfp8_moe.checkpoint.reading import BUFFER_BYTES, BUFFERS, FileReads
from ds_mxfp8_moe.layers.held_experts import HeldExperts
from tests.support.autoep_models import ds_config
from tests.support.frozen_checkpoints import write


def test_no_buffer_is_filled_before_the_gpu_has_copied_it(tmp_path):
    nbytes, file = 3 * BUFFERS * BUFFER_BYTES // 2 + 5, tmp_path / "file"
    data = torch.randint(256, (nbytes, ), dtype=torch.uint8)
    file.write_bytes(data.numpy().tobytes())
    busy = torch.randn(8192, 8192, device="cuda")
    with FileReads(torch.device("cuda", 0)) as reads:
        reads.open(file)
        for _ in range(50):
            busy @ busy
        size = nbytes // 40
        parts = list(reads.ahead(lambda job: reads.read(file, job * size, size), range(40)))
        whole = reads.read(file, 0, nbytes).cpu()
    assert torch.equal(whole, data) and torch.equal(torch.cat(parts).cpu(), data[:40 * size])


def loaded(directory, section) -> dict[str, torch.Tensor]:
    net = from_pretrained(directory, ds_config(section, ep_size=1))
    held = {name: module for name, module in net.named_modules() if isinstance(module, HeldExperts)}
    found = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    for name, module in held.items():
        weights = module.take(name, 0, module.num_experts, torch.bfloat16, module.down_proj.device)
        found |= {f"{name}.{key}": buffer.cpu() for key, buffer in weights.named_buffers()}
    return found


@pytest.mark.parametrize("family, kind, section", [
    ("qwen3_moe", "bf16", {}), ("qwen3_moe", "ue8m0", {}), ("qwen3_moe", "float", {}), ("gpt_oss", "mxfp4", {}),
    ("gpt_oss", "bf16", {}), ("qwen3_moe", "modelopt", {}), ("mixtral", "compressed-tensors", {}),
    ("gpt_oss", "mxfp4", {"frozen_experts": "mxfp8"}), ("qwen3_moe", "bf16", {"frozen_experts": "mxfp4"})])
def test_a_gpu_reads_the_bits_of_a_cpu(alone, tmp_path, family, kind, section):
    write(tmp_path, family, kind, hidden_size=512, moe_intermediate_size=384, intermediate_size=384)
    section = {"enabled": True, **section}
    wanted = loaded(tmp_path, section)
    found, = alone.run(loaded, tmp_path, section, seconds=120)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
