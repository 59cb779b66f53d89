# SPDX-License-Identifier: Apache-2.0
"""engine.save_checkpoint and load_checkpoint: each is whole or without effect, on all ranks alike.

Saving: DeepSpeed writes into a folder beside. A rank that cannot write notes the reason and goes on to DeepSpeed's
barriers. Then all ranks agree. If the files of all ranks are on the disk, the manifest is written and the folder takes
its place (manifest.py). Otherwise every rank raises the same error, and what was there is untouched.

Loading: the files of a checkpoint that has a manifest are compared with it before the first tensor is copied. The
ranks share them. An error of any rank is an error of every rank.
"""

import inspect
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.overrides import TorchFunctionMode

from ..compat.expert_groups import trains_experts
from ..config import ds_setting
from ..layers.frozen_experts import checksums_of_frozen
from ..ops.log import log_on_rank_0
from ..transport.deadline import PeerError, answers_of_all, deadline_for, failure_in_world, tell_peers
from .earlier_names import present_checkpoint
from .flash_states import fitted, in_full
from .loading import adapt_module, frozen_left_out, hide_mxfp8, name_broken_file, refuse_some_in_mxfp8
from .manifest import (
    MANIFEST,
    Place,
    describe,
    discard,
    find_damage,
    find_unlisted,
    put_in_place,
    read_latest,
    read_manifest,
    recover,
    write_manifest,
)
from .universal import load_universal

PROBE_BYTES = 2**20
UNTOUCHED = "What was there before is untouched"
UNCHANGED = "Nothing was copied: the engine is as before"
WHOLE_EXPERTS = ('the run that saved it had whole experts on every rank, as without "expert_parallel". Start from the '
                 "model that it has saved, by from_pretrained")
MIXED = ("Some tensors were copied before that, so the engine's state is mixed. Do not train on it: load another "
         "checkpoint, or start again")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises it, with the same text."""


class Checkpoints:
    """How an engine saves and loads. engine/moe_engine.py calls it in place of DeepSpeed's functions (`plain`).

    In ZeRO-3 without an optimizer, for evaluation, an engine has no checkpoint engine.
    """

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine
        self.loading: _Loading | None = None  # the load_checkpoint that runs now
        hide_mxfp8(engine)
        if type(engine.checkpoint_engine) is TorchCheckpointEngine:
            engine.checkpoint_engine = _Files(engine.checkpoint_engine, engine.optimizer)
        elif engine.checkpoint_engine is not None and not isinstance(engine.checkpoint_engine, _Files):
            log_on_rank_0(f"mxfp8_moe: WARNING: DeepSpeed's {type(engine.checkpoint_engine).__name__} writes "
                            "checkpoints as DeepSpeed does: in place, and without the manifest by which damaged files "
                            "are found")

    def save(self, plain: Callable, *args, **kwargs) -> Any:
        """save_checkpoint."""
        refuse_some_in_mxfp8(self.engine)
        given = _bound(plain, *args, **kwargs)
        if isinstance(self.engine.checkpoint_engine, _Files) and given.arguments["save_dir"]:
            return _save_checkpoint(self.engine, plain, given)
        with frozen_left_out(self.engine, given.arguments):
            return plain(*given.args, **given.kwargs)

    def load(self, plain: Callable, *args, **kwargs) -> Any:
        """load_checkpoint."""
        given = _bound(plain, *args, **kwargs)
        if self.engine.checkpoint_engine is None:
            with frozen_left_out(self.engine, given.arguments):
                return plain(*given.args, **given.kwargs)
        self.loading = _Loading(self.engine, given.arguments)
        try:
            return self.loading.run(partial(plain, *given.args, **given.kwargs))
        finally:
            self.loading = None

    def load_module(self, plain: Callable, *args, **kwargs) -> None:
        """load_module_state_dict, which load_checkpoint calls."""
        given = _bound(plain, *args, **kwargs)
        if self.loading is not None:
            return self.loading.load_module(plain, given)
        adapt_module(self.engine, given.arguments)
        return plain(*given.args, **given.kwargs)

    def copy_scripts(self, plain: Callable, save_path: str) -> None:
        """What save_checkpoint calls to copy scripts beside the checkpoint."""
        written = getattr(self.engine.checkpoint_engine, "written", None)
        plain(save_path) if written is None else written.copy_scripts(plain)


def _bound(plain: Callable, *args, **kwargs) -> inspect.BoundArguments:
    given = inspect.signature(plain).bind(*args, **kwargs)
    given.apply_defaults()
    return given


class _Files(TorchCheckpointEngine):
    """DeepSpeed's reader and writer of files. An error in reading names the file.

    Attributes:
        optimizer: the engine's.
        written: takes note of what is written. None: no checkpoint is being saved.
    """

    written: "_Written | None" = None

    def __init__(self, plain: TorchCheckpointEngine, optimizer: Any):
        self.__dict__.update(vars(plain))
        self.optimizer = optimizer

    def load(self, path: str, *args, **kwargs) -> Any:
        return fitted(name_broken_file(super().load, path, *args, **kwargs), self.optimizer)

    def save(self, state_dict: Any, path: str) -> None:
        def plain(state_dict: Any, path: str) -> None:
            TorchCheckpointEngine.save(self, in_full(state_dict, self.optimizer), path)

        plain(state_dict, path) if self.written is None else self.written.save(plain, state_dict, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        plain = super().makedirs
        plain(path, exist_ok) if self.written is None else self.written.make_folder(plain, path, exist_ok)


def _owner(engine: DeepSpeedEngine) -> int:
    """The rank that renames this rank's folders: rank 0, or the first of the node if each node has its own folders.

    Launchers number the ranks of a node in a row.
    """
    each_node = ds_setting(engine, "checkpoint", "use_node_local_storage")
    return engine.global_rank - int(os.environ["LOCAL_RANK"]) if each_node else 0


# ---------------------------------------------------------------- saving


class _Written:
    """Notes the files that this rank writes, and its first error, so that the rank goes on to DeepSpeed's barriers."""

    def __init__(self, folder: Path):
        self.folder, self.paths = folder, []
        self.failure: str | None = None

    def attempt(self, path: str | os.PathLike, action: Callable, *args, **kwargs) -> Any:
        """Calls `action`, which writes or reads `path`. After an error it does nothing any more."""
        if self.failure is None:
            try:
                return action(*args, **kwargs)
            except Exception as error:
                self.failure = f"{os.fspath(path)}: {_reason(path, error)}"
        return None

    def save(self, plain: Callable, state_dict: Any, path: str) -> None:
        self.paths.append(os.path.relpath(path, self.folder))
        self.attempt(path, plain, state_dict, path)

    def make_folder(self, plain: Callable, path: str, exist_ok: bool = False) -> None:
        self.attempt(path, plain, path, exist_ok=exist_ok)

    def copy_scripts(self, plain: Callable) -> None:
        self.attempt(self.folder, plain, str(self.folder))  # put_in_place moves them to save_path

    def describe(self) -> dict[str, dict[str, int]]:
        return self.attempt(self.folder, describe, self.folder, self.paths) or {}


def _reason(path: str | os.PathLike, error: Exception) -> str:
    """Why a file could not be written. torch's writer loses the system's error: writing more brings it back."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, OSError) and os.path.isfile(path):
        try:
            with open(path, "ab") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as answer:
            return f"{answer.strerror} ({text})"
    return text


def _save_checkpoint(engine: DeepSpeedEngine, plain: Callable, given: inspect.BoundArguments) -> Any:
    arguments = given.arguments
    tag = f"global_step{engine.global_steps}" if arguments["tag"] is None else str(arguments["tag"])
    place, owns = Place(Path(arguments["save_dir"]), tag), engine.global_rank == _owner(engine)
    manifest = {"tag": tag, "step": engine.global_steps, "save_latest": bool(arguments["save_latest"]),
                "world_size": dist.get_world_size(), "zero_stage": engine.zero_optimization_stage(),
                "ep_sizes": _ep_sizes(engine)}
    arguments.update(tag=place.part.name, save_latest=False)
    where, written = f"save_checkpoint, tag {tag!r}", _Written(place.part)
    try:
        if owns:  # the others wait in DeepSpeed's first barrier
            written.attempt(place.save_dir, recover, place.save_dir, remove_parts=True)
        engine.checkpoint_engine.written = written
        with frozen_left_out(engine, arguments), deadline_for(dist.get_world_group(), engine.device, where):
            result = plain(*given.args, **given.kwargs)
        mine = _owner(engine), tag, written.describe(), checksums_of_frozen(engine.module), written.failure
    except BaseException as error:
        if isinstance(error, Exception):
            tell_peers(error)
        shutil.rmtree(place.part, ignore_errors=True)
        raise
    finally:
        engine.checkpoint_engine.written = None
    try:  # from here on, the owner may have put the folder in place
        answers = answers_of_all(dist.get_world_group(), mine, where)
        failure = _find_disagreement(answers)
        if failure is not None:
            shutil.rmtree(place.part, ignore_errors=True)
        else:
            if owns:
                failure = _commit(place, manifest, answers, engine.global_rank)
            failure = failure_in_world(failure, where)
    except BaseException:
        if owns:
            recover(place.save_dir, remove_parts=True)
        raise
    if failure is not None:
        raise CheckpointError(f"save_checkpoint to {place.final} failed: {failure}. {UNTOUCHED}")
    return result


def _ep_sizes(engine: DeepSpeedEngine) -> dict[str, int]:
    """How many ranks share the experts of each MoE layer, if the optimizer has states of experts."""
    return {name: module.ep_size for name, module in engine.module.named_modules()
            if isinstance(module, (AutoEPMoELayer, MOELayer))} if trains_experts(engine) else {}


def _find_disagreement(answers: list) -> str | None:
    """Why a checkpoint is not whole, from the answers of all ranks."""
    tags = [answer[1] for answer in answers]
    if len(set(tags)) > 1:
        return f"the ranks were given different tags: {tags}. Give all ranks the same"
    return next((f"rank {rank}: {answer[-1]}" for rank, answer in enumerate(answers) if answer[-1]), None)


def _commit(place: Place, manifest: dict, answers: list, rank: int) -> str | None:
    """Writes the manifest and puts the checkpoint in place. Returns why it could not."""
    try:
        files, frozen = _join(place.part, answers, rank)
        write_manifest(place.part, {**manifest, "files": files, "frozen_experts": frozen})
        put_in_place(place)
    except Exception as error:
        discard(place)
        return f"rank {rank}: {type(error).__name__}: {error}"
    return None


def _join(folder: Path, answers: list, rank: int) -> tuple[dict, dict]:
    """The files in the folder of this rank, and the checksums of all frozen experts."""
    files: dict = {}
    frozen: dict = {}
    for writer, (owner, _, described, checksums, _) in enumerate(answers):
        for layer, experts in checksums.items():
            frozen.setdefault(layer, {}).update(experts)
        for name, file in described.items() if owner == rank else ():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise RuntimeError(f"rank {writer} has written {path}, which rank {rank} does not see: save_dir must "
                                   'be one folder for all ranks, or write "checkpoint": {"use_node_local_storage": '
                                   "true} in the DeepSpeed config")
            if name in files:  # two ranks have written it: whose it is was open until now
                file = describe(folder, [name])[name]
            files[name] = {**file, "rank": writer}
    for name, file in describe(folder, find_unlisted(folder, files)).items():
        files[name] = {**file, "rank": rank}
    return files, frozen


# ---------------------------------------------------------------- loading


class _Loading:
    """One load_checkpoint on one rank.

    Attributes:
        copied: whether a tensor may have been copied.
    """

    def __init__(self, engine: DeepSpeedEngine, arguments: dict):
        self.engine, self.arguments, self.copied = engine, arguments, False
        self.folder = Path(arguments["load_dir"])
        self.universal = bool(ds_setting(engine, "checkpoint", "load_universal"))

    def run(self, plain: Callable[[], Any]) -> Any:
        """Loads a checkpoint. Collective over all ranks."""
        try:
            if self.engine.global_rank == _owner(self.engine):
                recover(self.folder, remove_parts=False)
        except Exception as error:
            self.agree(error)
        self.agree()  # the others read only now
        tag = manifest = None
        try:
            tag, manifest = self.find()
            if manifest is not None:
                self.check(tag, manifest)
        except Exception as error:
            self.agree(error)
        self.agree(seen=(tag, manifest and manifest["step"]))
        try:
            with (deadline_for(dist.get_world_group(), self.engine.device, "load_checkpoint"),
                  frozen_left_out(self.engine, self.arguments)):
                self.copied = self.universal
                result = load_universal(self.engine, self.folder / tag, plain) if self.universal and tag else plain()
        except (PeerError, CheckpointError):
            raise
        except Exception as error:
            lacks_experts = isinstance(error, KeyError) and error.args == ("num_experts", )  # as DeepSpeed finds out
            self.agree(RuntimeError(WHOLE_EXPERTS) if lacks_experts else error)
        self.agree()
        return result

    def find(self) -> tuple[str | None, dict | None]:
        """The tag and the manifest of the checkpoint. None: there is none."""
        tag = self.arguments["tag"]
        if tag is None:
            tag = read_latest(self.folder, self.universal)
        if tag is None:
            return None, None
        tag = str(tag)
        if not tag or not (self.folder / tag).is_dir():
            found = sorted(path.name for path in self.folder.glob("[!.]*/"))
            raise FileNotFoundError(f"{self.folder} has no folder for the tag {tag!r}. It has {found}")
        return tag, read_manifest(self.folder / tag)

    def check(self, tag: str, manifest: dict) -> None:
        """Raises if this rank must not load the checkpoint."""
        engine, folder = self.engine, self.folder / tag
        for layer, experts in checksums_of_frozen(engine.module).items():
            listed = manifest.get("frozen_experts", {}).get(layer, {})
            if any(listed.get(expert, own) != own for expert, own in experts.items()):
                raise RuntimeError(
                    f"the frozen experts of {layer} are not those of the run that saved {folder}. They are held "
                    "quantized, in no checkpoint: this run has loaded another base model, or quantizes it differently "
                    "(frozen_experts, scaling_mode). Start from the same one. If the difference is meant, delete "
                    f'"frozen_experts" from {folder / MANIFEST}')
        with_states = (engine.optimizer is not None and self.arguments["load_optimizer_states"]
                       and not self.arguments["load_module_only"])
        if (with_states and engine.zero_optimization_stage() > 0
                and manifest["world_size"] != dist.get_world_size()):
            raise RuntimeError(
                f"{folder} was saved by {manifest['world_size']} ranks, and this run has {dist.get_world_size()}, to "
                "which ZeRO's optimizer states do not fit: pass load_optimizer_states=False, or convert it to a "
                "universal checkpoint")
        before = manifest.get("ep_sizes", {})
        for layer, size in _ep_sizes(engine).items() if with_states else ():
            if before.get(layer, size) != size:
                raise RuntimeError(
                    f"{folder} was saved with the experts of {layer} on {before[layer]} ranks, and this run has them "
                    f"on {size}, to which the optimizer's states do not fit: write the same size, pass "
                    "load_optimizer_states=False, or convert it to a universal checkpoint")
        mine = {name: file for name, file in manifest["files"].items()
                if file["rank"] % dist.get_world_size() == engine.global_rank}
        if damage := find_damage(folder, mine):
            raise RuntimeError(f"{damage}. Load an earlier checkpoint (tag= of load_checkpoint), or copy it again")

    def load_module(self, plain: Callable, given: inspect.BoundArguments) -> None:
        """Loads the module's tensors. What does not fit is found before any is copied, on any rank."""
        load_optimizer = self.arguments["load_optimizer_states"] and not self.arguments["load_module_only"]
        try:
            given.arguments["checkpoint"] = present_checkpoint(self.engine, given.arguments["checkpoint"],
                                                               load_optimizer)
            adapt_module(self.engine, given.arguments)
        except Exception as error:
            self.agree(error)
        self.agree()
        can_try = not (self.engine.zero_optimization_stage() == 3 or given.arguments.get("custom_load_fn")
                       or isinstance(self.engine.module, PipelineModule))
        try:
            if can_try:
                with _DryRun():
                    plain(*given.args, **given.kwargs)
        except Exception as error:
            self.agree(error)
        self.agree()
        self.copied = True
        plain(*given.args, **given.kwargs)

    def agree(self, error: Exception | None = None, seen: tuple = ()) -> None:
        """Raises CheckpointError on every rank if any rank has an error, or if what they see differs. Collective."""
        failure = error and f"{type(error).__name__}: {error}"
        answers = answers_of_all(dist.get_world_group(), (failure, self.copied, seen), "load_checkpoint")
        text = next((f"rank {rank}: {text}" for rank, (text, *_) in enumerate(answers) if text), None)
        if text is None and any(answer[2] != answers[0][2] for answer in answers):
            text = f"the ranks find different checkpoints (tag, step): {[answer[2] for answer in answers]}"
        if text is not None:
            state = MIXED if any(copied for _, copied, _ in answers) else UNCHANGED
            raise CheckpointError(f"load_checkpoint from {self.folder} failed: {text}. {state}") from error


class _DryRun(TorchFunctionMode):
    """Inside the context, Tensor.copy_ copies nothing, so that load_state_dict only checks names and shapes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))
