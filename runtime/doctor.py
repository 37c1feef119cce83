"""`forespark doctor`: what this machine has, which backends work here, and the one command that mends each lack."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from trtllm_forespark.models.registry import cache_home

EMBEDDED = "smollm2-135m"
# import name -> (distributions that may provide it, what to install: one of our extras in brackets, or packages)
OPTIONAL = {
    "torch": (("torch",), "[cpu]"),
    "safetensors": (("safetensors",), "[cpu]"),
    "gguf": (("gguf",), "[cpu]"),
    "tokenizers": (("tokenizers",), "[cpu]"),
    "jinja2": (("jinja2",), "[cpu]"),
    "fastapi": (("fastapi",), "[serve]"),
    "uvicorn": (("uvicorn",), "[serve]"),
    "triton": (("triton",), "[triton]"),
    "tensorrt": (("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), "[engines]"),
    "tensorrt_rtx_bindings": (
        ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
        "tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs",
    ),
    "modelopt": (("nvidia-modelopt",), "[quantize]"),
    "mpi4py": (("mpi4py",), "[mpi]"),
    "tensorrt_llm": (("tensorrt-llm", "tensorrt_llm"), "[trtllm]"),
    "pytriton": (("nvidia-pytriton",), "nvidia-pytriton"),  # carries a tritonserver
}
NEEDED = ("torch", "safetensors", "gguf", "tokenizers")


def report(home: Path | None = None) -> dict[str, Any]:
    """One JSON-able object about this machine. Nothing heavier than torch is imported, and torch only if it is there.

    Keys: `python, platform, cpu, memory, torch, packages, backends, cache, problems, ok`. Sizes are bytes.
    `backends[name]` has `works` and, where it does not, `why` and `mend`; `problems` are what keeps the embedded
    model from running here, each with the one command that mends it; `ok` is True where there are none.
    """
    packages = {name: _package(name) for name in OPTIONAL}
    torch = _torch() if packages["torch"]["found"] else {"version": None, "cuda": [], "error": "torch is not installed"}
    cache = _cache(home or cache_home())
    problems = _problems(packages, torch, cache)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        "torch": torch,
        "packages": packages,
        "backends": _backends(packages, torch),
        "cache": cache,
        "problems": problems,
        "ok": not problems,
    }


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    cpu, memory, torch = found["cpu"], found["memory"], found["torch"]
    gib = 2.0**30
    lines = [
        f"Python     {found['python']} on {found['platform']}",
        f"CPU        {cpu['model']}, {cpu['cores']} cores, {', '.join(cpu['flags']) or 'no AVX2'}",
        f"Memory     {memory['total'] / gib:.1f} GiB, {memory['available'] / gib:.1f} free" if memory["total"] else "",
        f"torch      {torch['version'] or torch['error']}",
        *(f"GPU        {g['name']}, {g['memory'] / gib:.0f} GiB, SM {g['capability']}" for g in torch["cuda"]),
        "",
        "Backends",
    ]
    for name, backend in found["backends"].items():
        state = "works" if backend["works"] else f"no: {backend['why']}"
        lines.append(f"  {name:<12} {state}" + (f" ({backend['mend']})" if backend.get("mend") else ""))
    lines += ["", "Packages"]
    for name, package in found["packages"].items():
        state = package["version"] or ("found" if package["found"] else f"missing ({package['mend']})")
        lines.append(f"  {name:<22} {state}")
    cache = found["cache"]
    lines += ["", f"Cache      {cache['home']}"]
    lines.append(f"  {EMBEDDED}: {'cached' if cache['embedded_model'] else 'not fetched yet'}")
    lines += [f"  latency table: {table}" for table in cache["latency_tables"]]
    lines += ["", *(f"Problem: {p['what']}. Mend it with: {p['mend']}" for p in found["problems"])]
    if found["ok"]:
        lines.append(f"Ready: forespark generate --model {EMBEDDED} 'Why is the sky blue?'")
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1]))


def _install(what: str) -> str:
    return f"pip install 'trtllm-forespark{what}'" if what.startswith("[") else f"pip install {what}"


def _package(name: str) -> dict[str, Any]:
    distributions, source = OPTIONAL[name]
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # half-removed packages
        found = False
    version = None
    for distribution in distributions:
        try:
            version = version or metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {"found": found, "version": version if found else None, "mend": None if found else _install(source)}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"version": None, "cuda": [], "error": f"torch does not import: {error}"}
    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            devices.append({"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"})
    return {
        "version": torch.__version__,
        "cuda": devices,
        "cuda_build": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "error": None,
    }


def _cpu() -> dict[str, Any]:
    # Not from machine.py: that needs torch, and the doctor is asked where torch is missing.
    facts = _proc("cpuinfo")
    have = facts.get("flags", "").split()
    named = {"AVX2": "avx2", "AVX512": "avx512f", "AVX512-BF16": "avx512_bf16", "AMX-BF16": "amx_bf16"}
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        cores = os.cpu_count() or 1
    model = facts.get("model name") or platform.processor()
    return {"model": model, "cores": cores, "flags": [name for name, flag in named.items() if flag in have]}


def _memory() -> dict[str, int]:
    facts = _proc("meminfo")
    total, free = (int(facts.get(key, "0 kB").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    if not total and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"total": total, "available": free}


def _proc(name: str) -> dict[str, str]:
    """The `key: value` lines of /proc/name, the first of each key; empty where the system has none."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc", name).read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return facts


def _backends(packages: dict[str, Any], torch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    def no(why: str, mend: str | None = None) -> dict[str, Any]:
        return {"works": False, "why": why, "mend": mend}

    yes = {"works": True, "why": None, "mend": None}
    have_torch = torch["version"] is not None
    no_torch = no(torch["error"] or "", _install("[cpu]"))
    if torch["cuda"]:
        cuda = yes
    elif not have_torch:
        cuda = no_torch
    elif torch.get("cuda_build"):
        cuda = no("no CUDA device answers", "nvidia-smi")
    else:
        cuda = no("this build of torch is for the CPU only")
    if not packages["tensorrt"]["found"]:
        engines = no("tensorrt is not installed", _install("[engines]"))
    elif not torch["cuda"]:
        engines = no("an engine runs on a CUDA device and none answers")
    else:
        engines = yes
    if not packages["tensorrt_llm"]["found"]:
        trtllm = no("tensorrt_llm is not installed", _install("[trtllm]"))
    else:
        trtllm = yes if torch["cuda"] else no("TensorRT-LLM needs a CUDA device and none answers")
    return {"torch-cpu": yes if have_torch else no_torch, "torch-cuda": cuda, "tensorrt": engines, "trtllm": trtllm}


def _cache(home: Path) -> dict[str, Any]:
    model = any("smollm2" in str(path.relative_to(home)).lower() for path in home.rglob("*.gguf"))
    tables = sorted(str(path) for path in home.glob("tables/*.json"))
    return {"home": str(home), "embedded_model": model, "latency_tables": tables}


def _problems(packages: dict[str, Any], torch: dict[str, Any], cache: dict[str, Any]) -> list[dict[str, str]]:
    problems = []
    missing = [name for name in NEEDED if not packages[name]["found"]]
    if missing:
        problems.append({"what": f"{', '.join(missing)} not installed", "mend": _install("[cpu]")})
    elif torch["error"]:
        problems.append({"what": torch["error"], "mend": f"{_install('[cpu]')} --force-reinstall"})
    if not cache["embedded_model"]:
        problems.append({"what": f"{EMBEDDED} is not in {cache['home']}", "mend": f"forespark pull {EMBEDDED}"})
    return problems
