# SPDX-License-Identifier: Apache-2.0
"""Brings files and their names to the disk, where a crash of the host does not lose them."""

import os
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    with suppress(OSError):  # some network file systems cannot
        sync(path)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's content. A process that dies meanwhile leaves the earlier content or the new one."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text)
        sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
