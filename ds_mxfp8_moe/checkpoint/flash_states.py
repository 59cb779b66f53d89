# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FlashAdamW have the form of AdamW's: masters and moments in float32.

FlashAdamW of flashoptim holds moments in 8 bits, and beside masters in bf16 the bits that these lack ("error_bits").
DeepSpeed's universal checkpoints and other optimizers know neither. So the files of ZeRO hold what these stand for,
and loading takes it back: a run goes on with the same bits, on other ranks, from AdamW, or with AdamW.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from ..compat.optimizer_parts import GROUP

# Of FlashAdamW's groups: the bytes of a master with its correction, 0 where there is none.
WIDTH = "master_bytewidth"
OWN = WIDTH, "quantize"  # what a run holds as it was made, however the run of a checkpoint did
BITS = "error_bits"
AT_ONCE = 2**26  # elements that the device converts at a time: only the host has room for all of them


def in_full(file: Any, zero: Any) -> Any:
    """What a file of ZeRO's optimizer is to hold: FlashAdamW's states in the form of AdamW's, on the host.

    Args:
        file: what DeepSpeed saves. Files of other things stay as they are.
        zero: the engine's optimizer.
    """
    if not is_flash(zero) or (found := _parts(file)) is None:
        return file
    base, masters, key = found
    masters = list(masters)
    for group in base["param_groups"]:
        for i in group["params"]:
            state = base["state"].get(i, {})
            for name, spec in zero.optimizer.quantized_state_spec.items():
                if f"{name}::scales" in state:
                    state[name] = _dequantized(state.pop(f"{name}::quantized"), state.pop(f"{name}::scales"), spec)
                elif name in state:  # "quantize": false
                    state[name] = state[name].float()
            if "step" in state:
                state["step"] = state["step"].float()
            if BITS in state:
                masters[i] = _exact(masters[i], _unpacked(state[BITS], group[WIDTH]))
            else:
                masters[i] = masters[i].float()
    return {**file, OPTIMIZER_STATE_DICT: {**file[OPTIMIZER_STATE_DICT], key: masters}}


def fitted(file: Any, zero: Any) -> Any:
    """What a run's file holds, in the form that this run's optimizer takes, if one of both is FlashAdamW."""
    if (found := _parts(file)) is None:
        return file
    base, masters, _ = found
    if not is_flash(zero) and not any(WIDTH in group for group in base["param_groups"]):
        return file
    # torch compares the numbers of groups, and of masters in them.
    for own, saved in zip(zero.optimizer.param_groups, base["param_groups"], strict=False):
        alike = saved.get(WIDTH) == own.get(WIDTH)
        saved.update({key: value for key, value in own.items() if key not in saved or key in OWN})
        for i in saved["params"]:
            state = base["state"].get(i, {})
            if not alike:
                state.pop(BITS, None)
            _fit(state, masters[i], own, zero)
    return file


@contextmanager
def as_adamw(zero: Any) -> Iterator[None]:
    """Inside the context, the masters of FlashAdamW are in float32 on the host, and there are no moments, so that
    DeepSpeed's reader of universal checkpoints puts in exact ones. Then FlashAdamW takes them over."""
    optimizer = zero.optimizer
    optimizer.state.clear()
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    if lent := not masters:  # ZeRO-3 gives the optimizer its masters for each step
        masters = zero.state_dict()[FP32_FLAT_GROUPS]
    own = [{key: group[key] for key in OWN} for group in optimizer.param_groups]
    held, exact = [master.data for master in masters], []
    for master in masters:
        master.data = master.data.to("cpu", torch.float32)
    if not lent:
        zero._link_all_hp_params()
    try:
        yield
    finally:
        for master, data in zip(masters, held, strict=True):
            exact.append(master.data)
            master.data = data.copy_(master.data)
    for group, keys in zip(optimizer.param_groups, own, strict=True):
        group.update(keys)
    if lent:
        optimizer.param_groups[0]["params"] = masters
    states = torch.optim.Optimizer.state_dict(optimizer)
    for i, state in states["state"].items():
        _fit(state, exact[i], own[0], zero)
    optimizer.load_state_dict(states)
    if lent:
        optimizer.param_groups[0]["params"] = []
    else:
        zero._link_all_hp_params()


def is_flash(zero: Any) -> bool:
    """Whether the optimizer within ZeRO's is one of flashoptim."""
    return hasattr(getattr(zero, "optimizer", None), "quantized_state_spec")


def _parts(file: Any) -> tuple[dict, list, str] | None:
    """The state of the optimizer within ZeRO's, the masters, and their key. None: no file of ZeRO's optimizer."""
    zero = file.get(OPTIMIZER_STATE_DICT) if isinstance(file, dict) else None
    for base, masters in ((BASE_OPTIMIZER_STATE, SINGLE_PARTITION_OF_FP32_GROUPS),
                          (OPTIMIZER_STATE_DICT, FP32_FLAT_GROUPS)):
        if isinstance(zero, dict) and isinstance(zero.get(base), dict) and masters in zero:
            return zero[base], zero[masters], masters
    return None


def _fit(state: dict, exact: torch.Tensor, own: dict, zero: Any) -> None:
    """Has the state of a master hold what the optimizer takes.

    Args:
        exact: the master in float32 or, if no correction was saved, in its own dtype. Without padding.
        own: the optimizer's group.
    """
    if "step" in state:  # DeepSpeed's own kinds of Adam count by an int
        count = int(state["step"])
        state["step"] = count if "deepspeed" in type(zero.optimizer).__module__ else torch.tensor(float(count))
    if own.get(WIDTH, 0) <= (2 if getattr(zero, "bf16_master_weights_and_gradients", False) else 4):
        state.pop(BITS, None)
    elif BITS not in state and "exp_avg" in state:
        state[BITS] = _correction(exact, own[WIDTH], state["exp_avg"].numel())


# ---------------------------------------------------------------- on the device


def _in_pieces(elements: int, dtype: torch.dtype, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """A flat tensor on the host, of whose pieces `compute` makes each on the device."""
    whole = torch.empty(elements, dtype=dtype)
    for start in range(0, elements, AT_ONCE):
        piece = slice(start, min(start + AT_ONCE, elements))
        whole[piece] = compute(piece)
    return whole


def _dequantized(values: torch.Tensor, scales: torch.Tensor, spec: Any) -> torch.Tensor:
    """A moment in float32. `scales`: in float16, or these bits as bfloat16."""
    from flashoptim.optimizers import dequantize

    scales = scales.view(torch.float16)
    return _in_pieces(values.numel(), torch.float32, lambda piece: dequantize(
        values[piece], scales[piece.start // GROUP:-(-piece.stop // GROUP)], signed=spec.signed,
        sqrt=spec.sqrt, softsign=spec.softsign))


def _exact(master: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A master with its correction, in float32: the nearest value that is the master again when it is rounded. The
    largest corrections stand for values at the border to the master's neighbor, or beyond."""
    from flashoptim import reconstruct_fp32_param

    def compute(piece: slice) -> torch.Tensor:
        value, held = reconstruct_fp32_param(master[piece], bits[piece]), master[piece].float()
        rounded = value.to(master.dtype).float()
        return torch.where(rounded == held, value, torch.nextafter((rounded + held) / 2, held))

    return _in_pieces(master.numel(), torch.float32, compute)


def _correction(exact: torch.Tensor, width: int, elements: int) -> torch.Tensor:
    """What a master in bf16 of `width` bytes with its correction holds beside it, with zeros up to `elements`."""
    from flashoptim import compute_ecc_bits

    device = get_accelerator().current_device_name()

    def compute(piece: slice) -> torch.Tensor:
        value = exact[piece].to(device, torch.float32)
        held = value.bfloat16()
        bits = compute_ecc_bits(value, held, width)
        return bits.to(held.dtype) if bits.dtype == torch.int8 else bits.view(held.dtype)

    correction = _in_pieces(exact.numel(), torch.bfloat16, compute)
    return torch.nn.functional.pad(correction, (0, elements - exact.numel()))


def _unpacked(bits: torch.Tensor, width: int) -> torch.Tensor:
    """The correction as kernels take it, from how FlashAdamW saves it."""
    return bits.to(torch.int8) if width == 3 else bits.view(torch.int16)
