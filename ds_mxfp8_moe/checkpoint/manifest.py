# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint as one whole: written beside, listed in a manifest, and put in place by renames.

In `save_dir`, beside the folder of the tag:

    .TAG.saving      a checkpoint that is being written. Once it has a manifest, it is whole
    .TAG.replaced    the earlier checkpoint of the same tag, while the new one takes its place
    .latest.next     what `latest` is to hold

If a process is killed, `recover` finishes the replacement of a whole checkpoint and removes the parts of any other.
Nothing here is collective, and nothing here knows DeepSpeed's engine.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from .disk import sync, sync_folder, write_whole

MANIFEST = "manifest.json"
LATEST, NEXT_LATEST = "latest", ".latest.next"
PART, REPLACED = ".saving", ".replaced"
SCRIPTS = "*.py"  # DeepSpeed's recovery scripts, which belong into save_dir
PIECE_BYTES, BLOCK_BYTES = 2**28, 2**22  # of a file: read by one thread, and read at once
THREADS = 4


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies before and after it is whole."""

    save_dir: Path
    tag: str

    @property
    def final(self) -> Path:
        return self.save_dir / self.tag

    @property
    def part(self) -> Path:
        return self.save_dir / f".{quote(self.tag, safe='')}{PART}"

    @property
    def replaced(self) -> Path:
        return self.save_dir / f".{quote(self.tag, safe='')}{REPLACED}"


def checksum(path: Path) -> int:
    """CRC-32 of the CRC-32s of a file's pieces. Threads read the pieces, since zlib computes without Python's lock."""

    def of_piece(start: int) -> bytes:
        block, crc, end = memoryview(bytearray(BLOCK_BYTES)), 0, start + PIECE_BYTES
        while start < end and (count := os.preadv(file.fileno(), [block[:end - start]], start)):
            crc, start = zlib.crc32(block[:count], crc), start + count
        return crc.to_bytes(4)

    with open(path, "rb") as file, ThreadPoolExecutor(THREADS) as threads:
        starts = range(0, os.path.getsize(path), PIECE_BYTES)
        return zlib.crc32(b"".join(threads.map(of_piece, starts)))


def describe(folder: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """What the manifest says about files below a folder. They are on the disk then. An OSError names its file."""

    def one(name: str) -> dict[str, int]:
        path = folder / name
        try:
            sync(path)
            return {"bytes": path.stat().st_size, "checksum": checksum(path)}
        except OSError as error:
            error.filename = str(path)
            raise

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(one, names), strict=True))


def find_unlisted(folder: Path, listed: dict) -> list[str]:
    """Names of the files below a folder that `listed` lacks, without recovery scripts."""
    scripts = set(folder.glob(SCRIPTS))
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()
             and path not in scripts]
    return [name for name in names if name not in listed]


def find_damage(folder: Path, files: dict[str, dict[str, int]]) -> str | None:
    """The first of `files` that is not what the manifest says about it, with the reason. None: there is none."""

    def one(name: str) -> str | None:
        path, listed = folder / name, files[name]
        if not path.is_file():
            return f"the checkpoint file {path} is missing"
        size = path.stat().st_size
        if size != listed["bytes"]:
            return f"the checkpoint file {path} ({size} bytes) is not whole: it was saved with {listed['bytes']} bytes"
        if checksum(path) != listed["checksum"]:
            return f"the checkpoint file {path} ({size} bytes) has changed since it was saved, or is of another save"
        return None

    with ThreadPoolExecutor(THREADS) as threads:
        return next(filter(None, threads.map(one, files)), None)


def write_manifest(folder: Path, manifest: dict) -> None:
    """Makes a checkpoint whole, whose files are on the disk. Atomic."""
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))


def read_manifest(folder: Path) -> dict | None:
    """None: there is none. Raises ValueError, which names the file, if it is not as `write_manifest` writes it."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if isinstance(manifest["files"], dict):
            return manifest
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    raise ValueError(f'{path} has no "files"')


def read_latest(save_dir: Path, universal: bool = False) -> str | None:
    """The tag in DeepSpeed's file `latest`. None: there is no such file."""
    path = save_dir / (f"{LATEST}_universal" if universal else LATEST)
    return path.read_text().strip() if path.is_file() else None


def put_in_place(place: Place) -> None:
    """Gives a whole checkpoint its name, and lets `latest` name it if its manifest says so.

    May be stopped after every step, and called again. A reader's `recover` may have done some of them meanwhile.
    """
    if (manifest := read_manifest(place.part)) is not None:
        if manifest["save_latest"]:
            write_whole(place.save_dir / NEXT_LATEST, place.tag)
        with suppress(FileNotFoundError):
            for script in place.part.glob(SCRIPTS):
                os.replace(script, place.save_dir / script.name)
            place.final.parent.mkdir(parents=True, exist_ok=True)
            if place.final.exists():
                shutil.rmtree(place.replaced, ignore_errors=True)
                os.rename(place.final, place.replaced)
            os.rename(place.part, place.final)
        sync_folder(place.final.parent)
    _finish(place)


def discard(place: Place) -> None:
    """Removes a checkpoint that is not in place, and gives the one that it was to replace its name back."""
    (place.part / MANIFEST).unlink(missing_ok=True)  # first, so that it is not whole meanwhile
    (place.save_dir / NEXT_LATEST).unlink(missing_ok=True)
    shutil.rmtree(place.part, ignore_errors=True)
    _finish(place)


def recover(save_dir: Path, remove_parts: bool) -> None:
    """Ends what a process that was killed has left.

    `remove_parts`: also of checkpoints that are not whole. A reader leaves these: another process may be writing them.
    """
    for place in _find_unfinished(save_dir, PART):
        if (place.part / MANIFEST).exists():
            put_in_place(place)
        elif remove_parts:
            shutil.rmtree(place.part)
    for place in _find_unfinished(save_dir, REPLACED):
        _finish(place)
    if (path := save_dir / NEXT_LATEST).exists():
        _move_latest(path)


def _find_unfinished(save_dir: Path, ending: str) -> Iterator[Place]:
    for path in filter(Path.is_dir, sorted(save_dir.glob(f".*{ending}"))):
        yield Place(save_dir, unquote(path.name[1:].removesuffix(ending)))


def _finish(place: Place) -> None:
    """After the renames. What is not DeepSpeed's in an earlier folder of the same tag moves to the new one."""
    if place.replaced.exists() and not place.final.exists():
        os.rename(place.replaced, place.final)
    elif place.replaced.exists():
        for path in place.replaced.iterdir():
            ours = path.name.endswith("_states.pt") or path.name in ("offloaded_tensors", MANIFEST)
            if not ours and not (place.final / path.name).exists():
                os.rename(path, place.final / path.name)
    if (path := place.save_dir / NEXT_LATEST).exists():
        _move_latest(path)
    shutil.rmtree(place.replaced, ignore_errors=True)


def _move_latest(path: Path) -> None:
    """`latest` gets its next content, if there is such a checkpoint."""
    if (path.parent / path.read_text()).is_dir():
        os.replace(path, path.parent / LATEST)
        sync_folder(path.parent)
    else:
        path.unlink()
