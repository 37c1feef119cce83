"""The floors hold, heavy packages stay where they are owned, and the package is whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "trtllm_forespark"
LINKS = ("plugins", "build_scripts", "runtime")
DOORS = re.compile(rf"{PACKAGE}/(__init__|cli|cli_\w+)\.py")

# Who may import a heavy package: folders and files, relative to the root.
OWNERS = {
    "triton": ("plugins/",),
    "tensorrt": ("plugins/tensorrt/", "build_scripts/", "runtime/backends/tensorrt"),
    "tensorrt_rtx": ("plugins/tensorrt/", "build_scripts/", "runtime/backends/tensorrt"),
    "tensorrt_rtx_bindings": ("plugins/tensorrt/", "build_scripts/", "runtime/backends/tensorrt"),
    "modelopt": ("build_scripts/",),
    "tensorrt_llm": ("runtime/trtllm/",),
    "mpi4py": ("runtime/ranks.py",),
    "matplotlib": ("runtime/plots.py", "runtime/bench/charts.py"),
    "PIL": ("runtime/plots.py",),
    "tritonserver": ("runtime/triton/",),
    "triton_python_backend_utils": ("runtime/triton/",),
    "fastapi": ("runtime/serving/",),
    "uvicorn": ("runtime/serving/",),
}


def sources() -> Iterator[str]:
    """Every module of ours, by its real path relative to the root."""
    folders = [ROOT / PACKAGE, *(ROOT / link for link in LINKS)]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(ROOT)
            linked = len(inside.parts) > 2 and inside.parts[0] == PACKAGE and inside.parts[1] in LINKS
            if not linked:
                yield inside.as_posix()


def module_of(path: str) -> str:
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return dotted if dotted.startswith(PACKAGE) else f"{PACKAGE}.{dotted}"


@cache
def imports(path: str) -> list[str]:
    """Dotted names that a module imports, anywhere in it."""
    return list(_imports(path))


def _imports(path: str) -> Iterator[str]:
    here = module_of(path).split(".")
    if not path.endswith("__init__.py"):
        here = here[:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def is_under(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def test_modules_are_found() -> None:
    found = list(sources())
    assert f"{PACKAGE}/wcs/stages.py" in found and "runtime/verify.py" in found
    assert not [path for path in found if path.startswith(f"{PACKAGE}/runtime")]


def test_the_scheduler_knows_only_numpy_the_standard_library_and_the_settings() -> None:
    allowed = {*sys.stdlib_module_names, "numpy"}
    wrong = [
        f"{path}: {name}"
        for path in sources()
        if path.startswith(f"{PACKAGE}/wcs/")
        for name in imports(path)
        if name.split(".")[0] not in allowed and not is_under(name, f"{PACKAGE}.wcs", f"{PACKAGE}.config")
    ]
    assert not wrong


def test_no_import_goes_up_a_floor() -> None:
    above = {"library": LINKS, "plugins": ("runtime",), "build_scripts": ("runtime",), "runtime": ()}
    wrong = []
    for path in sources():
        if DOORS.fullmatch(path):
            continue
        top = path.split("/")[0]
        higher = [f"{PACKAGE}.{floor}" for floor in above["library" if top == PACKAGE else top]]
        doors = [f"{PACKAGE}.cli", f"{PACKAGE}.LLM"]
        wrong += [f"{path}: {name}" for name in imports(path) if is_under(name, *higher, *doors)]
    assert not wrong


@pytest.mark.parametrize("package", OWNERS)
def test_a_heavy_package_is_imported_only_where_it_is_owned(package: str) -> None:
    wrong = [
        f"{path}: {name}"
        for path in sources()
        for name in imports(path)
        if is_under(name, package) and not path.startswith(OWNERS[package])
    ]
    assert not wrong


@pytest.mark.parametrize("door", ["", ".cli"])
def test_the_doors_open_without_heavy_packages(door: str) -> None:
    heavy = {"torch", "transformers", "safetensors", "tokenizers", "gguf", "scipy", *OWNERS}
    code = f"import {PACKAGE}{door}, sys; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_links_are_relative_and_lead_to_the_folders() -> None:
    for link in LINKS:
        path = ROOT / PACKAGE / link
        assert path.is_symlink(), f"{path} must be a symbolic link (git config core.symlinks true)"
        assert path.readlink() == Path("..") / link
        assert (path / "__init__.py").exists()


def packages_on_disk() -> set[str]:
    return {module_of(path) for path in sources() if path.endswith("__init__.py")} | {PACKAGE}


def test_every_package_is_listed_for_the_wheel() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r"^packages = \[$(.*?)^\]$", text, re.MULTILINE | re.DOTALL)
    assert match
    assert set(re.findall(r'"([\w.]+)"', match[1])) == packages_on_disk()
    for path in sources():
        assert (ROOT / path).with_name("__init__.py").exists(), f"{path} lies in a folder without __init__.py"


@pytest.mark.full
def test_the_wheel_holds_every_module_and_every_shipped_file(tmp_path: Path) -> None:
    """Built from the files that git tracks; pip fetches the build backend."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={clone}/"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(out), str(clone)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path.relative_to(clone).as_posix() for path in clone.rglob("*") if path.is_file()]
    shipped = {f if f.startswith(PACKAGE) else f"{PACKAGE}/{f}" for f in files if f.startswith((PACKAGE, *LINKS))}
    missing = {f for f in shipped - names if ".egg-info/" not in f}
    assert not missing
    assert any(name.endswith("licenses/LICENSE") for name in names)
