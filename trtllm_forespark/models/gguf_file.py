"""The header of a GGUF file (versions 2 and 3, little endian) and its tensors' bytes.

The `gguf` package reads headers too, but takes seconds for a vocabulary (one NumPy view a string); its dequantisation
is what `loaders_gguf` uses.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .loaders import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """shape as in PyTorch (rows first); kind: the GGML type number; offset, size: bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class GgufFile:
    """Metadata (plain Python values by key) and tensor places of one file. Raises CheckpointError for a broken one."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError:
            raise CheckpointError(
                f"{path}: reading it needs the gguf package: pip install 'trtllm-forespark[cpu]'"
            ) from None
        self.path = path
        try:
            self.data = np.memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        self._buffer, self._at = memoryview(self.data.data), 0
        if bytes(self._buffer[:4]) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file (it starts with {bytes(self._buffer[:4])!r})")
        try:
            self._at = 4
            version, tensors, entries = self._read("<I"), self._read("<Q"), self._read("<Q")
            if version not in (2, 3):
                raise CheckpointError(f"{path}: GGUF version {version} is not supported (2, 3)")
            self.metadata: dict[str, Any] = {}
            for _ in range(entries):
                key = self._string()
                self.metadata[key] = self._value(self._read("<I"))
            infos = [self._tensor_info() for _ in range(tensors)]
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{path}: GGUF header broken or cut short at byte {self._at} ({error})") from None
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            try:
                block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise CheckpointError(f"{path}: tensor {name} has the unknown type {kind}") from None
            size = math.prod(shape) // block * width
            if start + offset + size > len(self.data):
                raise CheckpointError(
                    f"{path}: cut short: tensor {name} {list(shape)} ends at byte {start + offset + size}, "
                    f"the file at {len(self.data)}; fetch it again"
                )
            self.tensors[name] = GgufTensor(name, shape, kind, start + offset, size)

    def bytes_of(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's stored bytes [size] uint8 (a view of the mapped file)."""
        return np.asarray(self.data[tensor.offset : tensor.offset + tensor.size])

    def _read(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._buffer, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._read("<Q")
        end = self._at + length
        if end > len(self._buffer):
            raise struct.error(f"a string of {length} bytes")
        text = bytes(self._buffer[self._at : end]).decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._read("<" + _SCALARS[kind])
        kind, length = self._read("<I"), self._read("<Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(length)]
        form = f"<{length}{_SCALARS[kind]}"
        values = list(struct.unpack_from(form, self._buffer, self._at))
        self._at += struct.calcsize(form)
        return values

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._read("<I")
        shape = tuple(reversed([self._read("<Q") for _ in range(dimensions)]))
        return name, shape, self._read("<I"), self._read("<Q")
