# SPDX-License-Identifier: Apache-2.0
"""A checkpoint takes its place by renames. It may be stopped between any two of them."""

import json
import os

import pytest

from ds_mxfp8_moe.checkpoint import manifest as of
from ds_mxfp8_moe.checkpoint.manifest import Place
from tests.support.killed import killed_at


def written(folder, step: int, save_latest: bool = True) -> None:
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(bytes([step]) * 1000)
    (folder / "zero_to_fp32.py").write_text(f"step {step}")
    files = of.describe(folder, ["mp_rank_00_model_states.pt"])
    of.write_manifest(folder, {"step": step, "save_latest": save_latest, "files": files})


def state_of(save_dir, tag: str) -> tuple:
    manifest = of.read_manifest(save_dir / tag)
    return (manifest["step"], of.find_damage(save_dir / tag, manifest["files"]), of.read_latest(save_dir),
            (save_dir / "zero_to_fp32.py").read_text(), [path.name for path in save_dir.glob(".*")])


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.parametrize("same_tag", [True, False])
def test_a_whole_checkpoint_is_put_in_place_from_any_point_at_which_it_was_stopped(tmp_path, same_tag):
    for operation in range(40):
        save_dir = tmp_path / str(operation)
        save_dir.mkdir()
        first, second = Place(save_dir, "a/b"), Place(save_dir, "a/b" if same_tag else "c")
        written(first.part, 1)
        of.put_in_place(first)
        (first.final / "mine.txt").write_text("of the user")
        written(second.part, 2)
        died = killed_at(operation, of.put_in_place, second)
        of.recover(save_dir, remove_parts=False)
        assert state_of(save_dir, second.tag) == (2, None, second.tag, "step 2", []), operation
        assert (first.final / "mine.txt").read_text() == "of the user"
        if not died:
            break
    assert operation > 3


def test_what_is_not_whole_is_removed_by_a_save_and_left_by_a_load(tmp_path):
    place = Place(tmp_path, "t")
    written(place.part, 1, save_latest=False)
    of.put_in_place(place)
    written(place.part, 2)
    (place.part / of.MANIFEST).unlink()
    of.recover(tmp_path, remove_parts=False)
    assert place.part.exists() and of.read_latest(tmp_path) is None
    of.recover(tmp_path, remove_parts=True)
    assert state_of(tmp_path, "t")[:2] == (1, None) and not place.part.exists()


def test_a_checkpoint_that_cannot_be_put_in_place_leaves_the_earlier_one(tmp_path):
    place = Place(tmp_path, "t")
    written(place.part, 1)
    of.put_in_place(place)
    written(place.part, 2)
    os.rename(place.final, place.replaced)  # the next rename failed
    of.discard(place)
    assert state_of(tmp_path, "t")[:3] == (1, None, "t") and not list(tmp_path.glob(".*"))


def test_damage_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(of, "PIECE_BYTES", 300)  # a file of four pieces, and blocks that end within one
    monkeypatch.setattr(of, "BLOCK_BYTES", 128)
    path = tmp_path / "f"
    path.write_bytes(os.urandom(1000))
    listed = of.describe(tmp_path, ["f"])
    assert of.find_damage(tmp_path, listed) is None
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    assert "has changed since it was saved" in of.find_damage(tmp_path, listed)
    path.write_bytes(data[:-1])
    assert "(999 bytes) is not whole: it was saved with 1000 bytes" in of.find_damage(tmp_path, listed)
    path.unlink()
    assert f"{path} is missing" in of.find_damage(tmp_path, listed)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"files": 1})])
def test_a_manifest_that_is_none_is_named(tmp_path, text):
    (tmp_path / of.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=of.MANIFEST):
        of.read_manifest(tmp_path)
