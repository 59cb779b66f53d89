# SPDX-License-Identifier: Apache-2.0
"""Replaces a saved model by a new one, so that a killed process, a full disk or Ctrl-C never harms the earlier one.

    with staged("run/final") as folder:
        model.save_pretrained(folder)

The new files are written to a hidden folder inside the directory, and brought to the disk. Then they are put in place:

1. New shards get names that are free in the directory. An index in the hidden folder, `PLACING`, names them.
2. The switch: config.json is replaced by the new one with `transformers_weights`, the key by which transformers'
   from_pretrained finds weights under another name. It names that index. Before the switch, from_pretrained reads the
   earlier model, and afterwards the new one. Without a new config.json, the index of the weights is what is replaced.
3. The new index takes the usual name, the earlier weights go, and config.json loses the key. A single file is moved to
   its usual name last: from_pretrained prefers it to the index, which names it in the hidden folder until then.

The next save in the directory completes a save that was interrupted after the switch. It removes the files of one that
was interrupted before.

Adapters of PEFT have no such key. If their config changes, there is a moment in which they cannot be loaded. The next
save completes this, too. Other files of the directory stay as they are.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import deepspeed.comm as dist

from .disk import sync, sync_folder, write_whole

WEIGHTS_FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
README = "README.md"  # which PEFT completes
PLACING = "placing.safetensors.index.json"
ADAPTERS, ADAPTERS_CONFIG = "adapter_model", "adapter_config.json"
SHARD = re.compile(r"model(-\d+)?(?P<number>-\d{5}-of-\d{5}\.safetensors)")


def stage_of(directory: str | os.PathLike) -> Path:
    """The hidden folder to which this rank writes what is to be put into `directory`."""
    return Path(directory) / f".saving-{dist.get_rank() if dist.is_initialized() else 0}"


def weight_files(directory: Path) -> set[Path]:
    """What a saved model's weights are in, as seen from its directory."""
    shards = set(_weight_map(directory / INDEX).values())
    return {Path(name) for name in (shards | {INDEX} if shards else {WEIGHTS_FILE})}


@contextmanager
def staged(directory: str | os.PathLike, flushed: Callable[[], None] = lambda: None,
           reads: Sequence[str] = (), in_place: bool = False) -> Iterator[Path]:
    """Yields a folder. What the context writes there replaces files of `directory`, if it ends without an error.

    Args:
        flushed: called after each file that has been brought to the disk.
        reads: files of the directory that the context reads, and writes again: the folder has copies.
        in_place: the context writes to the directory itself, without any of this.

    Raises:
        NotADirectoryError: there is a file in the place of the directory.
    """
    directory, stage = Path(directory), stage_of(directory)
    if directory.is_file():
        raise NotADirectoryError(f"expected a folder, or a path that does not exist yet; {directory} is a file")
    if in_place:
        yield directory
        return
    _settle(directory, stage)
    try:
        stage.mkdir(parents=True)
        for name in reads:
            if (directory / name).is_file():
                shutil.copy(directory / name, stage / name)
        yield stage
        for path in filter(Path.is_file, stage.rglob("*")):
            sync(path)
            flushed()
        sync_folder(stage)
        with _locked(directory):
            _place(directory, stage)
    except BaseException as error:
        with suppress(OSError):  # the first error counts
            if files := [path for path in stage.rglob("*") if path.is_file()]:
                last = max(files, key=lambda path: path.stat().st_mtime_ns)
                error.add_note(f"The file that was written last is {directory / last.relative_to(stage)}")
            _settle(directory, stage)
        raise


def _place(directory: Path, stage: Path) -> None:
    """Puts the files of `stage` in place."""
    shards = {}
    if (stage / INDEX).exists():
        index = json.loads((stage / INDEX).read_text())
        shards = _free_names(directory, set(index["weight_map"].values()))
        index["weight_map"] = {name: shards[file] for name, file in index["weight_map"].items()}
    else:
        index = _index_of(stage / WEIGHTS_FILE)
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    if index["weight_map"]:
        write_whole(stage / INDEX, text)
    write_whole(stage / PLACING, text)
    for file, name in shards.items():
        (stage / file).rename(directory / name)
    sync_folder(directory)
    if index["weight_map"] and (stage / CONFIG).exists():
        config = json.loads((stage / CONFIG).read_text())
        config["transformers_weights"] = f"{stage.name}/{PLACING}"
        pointing = stage / "config.placing.json"
        write_whole(pointing, json.dumps(config, indent=2, sort_keys=True) + "\n")
        pointing.replace(directory / CONFIG)
        sync_folder(directory)
    _finish(directory, stage)


def _finish(directory: Path, stage: Path) -> None:
    """The steps after the switch. Each may have been made before: the process may have died among them."""
    _place_others(directory, stage)
    new = set(_weight_map(stage / PLACING).values())
    single = new == {f"{stage.name}/{WEIGHTS_FILE}"}
    moved = single and not (stage / WEIGHTS_FILE).exists()
    _move(stage / INDEX, directory / INDEX)
    if new and not moved:  # from_pretrained would prefer the earlier single file to the index
        (directory / WEIGHTS_FILE).unlink(missing_ok=True)
    _move(stage / CONFIG, directory / CONFIG)
    if single:
        _move(stage / WEIGHTS_FILE, directory / WEIGHTS_FILE)
        (directory / INDEX).unlink(missing_ok=True)
    if new:
        for path in directory.iterdir():
            if SHARD.fullmatch(path.name) and path.name not in new:
                path.unlink()
    sync_folder(directory)
    (stage / PLACING).unlink()
    shutil.rmtree(stage)


def _place_others(directory: Path, stage: Path) -> None:
    """Moves all files but the weights, their index and the model's config. The config of adapters is moved first."""
    staying = {stage / name for name in (PLACING, INDEX, WEIGHTS_FILE, CONFIG)}
    others = [path for path in stage.rglob("*") if path.is_file() and path not in staying]
    for path in sorted(others, key=lambda path: path.name != ADAPTERS_CONFIG):
        target = directory / path.relative_to(stage)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name == ADAPTERS_CONFIG and not _same_bytes(path, target):
            for earlier in target.parent.glob(f"{ADAPTERS}.*"):  # the new config does not fit them
                earlier.unlink()
        path.replace(target)


def _move(source: Path, target: Path) -> None:
    """Moves a file, unless there is none: it was moved before, or the save has none."""
    if source.exists():
        source.replace(target)


def _settle(directory: Path, stage: Path) -> None:
    """Completes or removes what an interrupted save has left behind."""
    if (stage / PLACING).exists():
        placing = _weight_map(stage / PLACING)
        config = json.loads((directory / CONFIG).read_text()) if (directory / CONFIG).exists() else {}
        switched = config.get("transformers_weights") == f"{stage.name}/{PLACING}"
        if not placing or switched or _same_bytes(stage / PLACING, directory / INDEX):
            return _finish(directory, stage)
        for name in set(placing.values()) - set(_weight_map(directory / INDEX).values()):
            if SHARD.fullmatch(name):
                (directory / name).unlink(missing_ok=True)
        (stage / PLACING).unlink()
    if stage.exists():
        shutil.rmtree(stage)


def _free_names(directory: Path, files: set[str]) -> dict[str, str]:  # type: ignore[return]
    """A name for each shard that no file of the directory has: model-00001-of-00002, model-1-00001-of-00002, ..."""
    taken = {path.name for path in directory.iterdir()} | set(_weight_map(directory / INDEX).values())
    for i in count():
        stem = f"model-{i}" if i else "model"
        names = {file: SHARD.sub(rf"{stem}\g<number>", file) for file in sorted(files)}
        if not taken & set(names.values()):
            return names


def _index_of(file: Path) -> dict:
    """An index of one file in the hidden folder, as seen from the directory. Without tensors if there is no file."""
    if not file.exists():
        return {"metadata": {}, "weight_map": {}}
    from safetensors import safe_open  # transformers brings it

    with safe_open(file, framework="pt") as opened:
        place = dict.fromkeys(opened.keys(), f"{file.parent.name}/{file.name}")
    return {"metadata": {"total_size": file.stat().st_size}, "weight_map": place}


def _weight_map(index: Path) -> dict[str, str]:
    return json.loads(index.read_text())["weight_map"] if index.exists() else {}


def _same_bytes(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.read_bytes() == other.read_bytes()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time, where ranks of one host save the same model although one of them would do."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # network file systems may not lock folders
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
