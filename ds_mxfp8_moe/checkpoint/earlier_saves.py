# SPDX-License-Identifier: Apache-2.0
"""Lets rank 0 alone save a spread model again, once all ranks have saved the same weights.

axolotl does so: its Trainer writes a checkpoint at the last step, for which all ranks gather the model. Then rank 0
calls the model's own save_pretrained, while its peers go on. The call copies the checkpoint's files, if this rank's
weights are still those that the checkpoint has.
"""

import shutil
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from .staging import INDEX, SHARD, WEIGHTS_FILE, staged, weight_files

GATHERED = "_mxfp8_gathered"  # on a model: fingerprint and tensors of the last whole state dict
SAVES = "_mxfp8_saves"  # on a model: fingerprint -> a folder that has these weights, and what else was saved with them
# Arguments of save_pretrained that a copy obeys, or that do not matter to it.
OBEYED = {"self", "save_directory", "is_main_process", "max_shard_size"}


def remember_gathered(model: torch.nn.Module, state: dict) -> None:
    """`state`: the whole model's, on the rank that has gathered it. Takes a pass over this rank's weights."""
    vars(model)[GATHERED] = _fingerprint(model), WeakValueDictionary(state)


def remember_saved(model: torch.nn.Module, state: dict, directory: Path, files: list[Path]) -> None:
    """`files` in `directory` were saved from `state`, which counts only if it is the state dict that was gathered."""
    directory = directory.resolve()
    saves = {of: saved for of, saved in vars(model).get(SAVES, {}).items() if saved[0] != directory}
    fingerprint, gathered = vars(model).get(GATHERED, (None, {}))
    if {*state} == {*gathered} and all(gathered.get(name) is tensor for name, tensor in state.items()):
        others = [file for file in files if file.name not in (WEIGHTS_FILE, INDEX) and not SHARD.fullmatch(file.name)]
        saves[fingerprint] = directory, others
    vars(model)[SAVES] = saves


def copied_from_earlier_save(model: torch.nn.Module, arguments: dict) -> bool:
    """Saves the model by a copy, and returns whether it could. `arguments`: of its save_pretrained."""
    if SAVES not in vars(model) or {name for name, value in arguments.items() if value} - OBEYED:
        return False
    folder, others = vars(model)[SAVES].get(_fingerprint(model), (Path(), []))
    files = [*others, *weight_files(folder)] if others else []
    if not files or not all((folder / file).is_file() for file in files):
        return False
    with staged(arguments["save_directory"]) as to:
        for file in files:
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, to / file)
    return True


def _fingerprint(model: torch.nn.Module) -> tuple[int, ...]:
    """Of the bits of this rank's weights and buffers, or of its part of them in ZeRO-3. The host waits for the
    device."""
    tensors = [getattr(one, "ds_tensor", one).detach() for one in (*model.parameters(), *model.buffers())]
    hashes = [torch.hash_tensor(one) for one in tensors if one.numel()]
    return tuple(int(one.view(torch.int64)) for one in hashes)
