"""What this machine is and how torch should use it."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

import torch


def choose_device(name: str) -> torch.device:
    """Raises ValueError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is no torch device; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(
            f"device {name!r} is not on this machine (torch sees {torch.cuda.device_count()} CUDA devices)"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device multiplies it natively, else float32 (emulated bf16 is many times slower)."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if {"amx_bf16", "avx512_bf16"} & cpu_flags() else torch.float32


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel lists them; empty where it does not (macOS, Windows)."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@cache
def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """A name latencies belong to: the CPU's with torch's thread count, or the GPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


@cache
def prepare_allocator() -> None:
    """Keep freed memory in the process; does nothing where there is no glibc.

    By default glibc returns large blocks to the kernel and takes them again, page fault by page fault, at every step.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")  # read at the first product; see TorchBackend.warm
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass
