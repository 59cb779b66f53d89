# SPDX-License-Identifier: Apache-2.0
"""Files hold what FlashAdamW's states stand for, and give the same states again: by flashoptim's own kernels."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ELEMENTS = 2500  # three pieces, the last one without a whole number of scales
SPECS = {"exp_avg": SimpleNamespace(signed=True, sqrt=False, softsign=True),
         "exp_avg_sq": SimpleNamespace(signed=False, sqrt=True, softsign=False)}


class OneSize:
    """A kernel of flashoptim without the choice of its block size, for which Triton asks a GPU."""

    def __init__(self, kernel):
        self.kernel = kernel.fn

    def __getitem__(self, grid):
        return lambda *args: self.kernel[(4, )](*args, BLOCK_SIZE_N=256)


def values() -> torch.Tensor:
    """Zeros, tiny and large values, and values as far from a power of two as rounding to bf16 takes them there."""
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    x[:100] = 0
    x[100:200] *= 1e-30
    x[200:300] = 2.0**(torch.arange(100) % 16 - 12) * (1 - 2.0**-9)
    return x


def there_and_back(width: int) -> None:
    import flashoptim.optimizers as flash
    from triton import language as tl

    from ds_mxfp8_moe.checkpoint import flash_states

    # What Triton's interpreter lacks: `copysign`, and a device.
    stubs = {"libdevice": SimpleNamespace(copysign=lambda x, like: tl.where(like < 0, -x, x)),
             "_get_sm_count": lambda: 4,
             **{name: OneSize(getattr(flash, name)) for name in ("_triton_quantize_kernel",
                                                                 "_triton_dequantize_kernel")}}
    with mock.patch.multiple(flash, **stubs), mock.patch.object(flash_states, "AT_ONCE", 1024):
        x = values()
        master, moments = x.bfloat16(), {}
        bits = flash.compute_ecc_bits(x, master, width)
        for name, spec in SPECS.items():
            moments[name] = flash.quantize(x.abs() if spec.sqrt else x, signed=spec.signed, sqrt=spec.sqrt,
                                           softsign=spec.softsign)
        group = {"params": [0], "master_bytewidth": width, "quantize": True}
        state = {"step": torch.tensor(3), "error_bits": bits.bfloat16() if width == 3 else bits.view(torch.bfloat16)}
        for name, (quantized, scales) in moments.items():
            state |= {f"{name}::quantized": quantized, f"{name}::scales": scales.view(torch.bfloat16)}
        file = {"optimizer_state_dict": {"optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
                                         "fp32_flat_groups": [master]}}
        zero = SimpleNamespace(optimizer=SimpleNamespace(quantized_state_spec=SPECS, param_groups=[{**group}]),
                               bf16_master_weights_and_gradients=True)
        saved = flash_states.in_full(file, zero)["optimizer_state_dict"]
        exact, state = saved["fp32_flat_groups"][0], saved["optimizer_state_dict"]["state"][0]
        assert torch.equal(exact.bfloat16(), master)
        # In float32 there are 2^-23 of a value; in 24 bits, 2^-16, and half as many on one side of a power of two.
        assert torch.allclose(exact, x, rtol={3: 2.0**-15, 4: 2.0**-22}[width], atol=0)
        for name, spec in SPECS.items():
            again = flash.quantize(state[name], signed=spec.signed, sqrt=spec.sqrt, softsign=spec.softsign)
            assert all(map(torch.equal, again, moments[name]))
        group["master_bytewidth"] = 0  # as if masters in float32 had been saved
        flash_states.fitted({"optimizer_state_dict": saved}, zero)
        found = flash_states._unpacked(state["error_bits"], width)
        assert (found.int() - bits.int()).abs().max() <= 1
        assert torch.equal(flash_states._exact(master, found)[300:], exact[300:])


@pytest.mark.parametrize("width", [3, 4])
def test_there_and_back(interpreter, width):
    interpreter(there_and_back, width)
