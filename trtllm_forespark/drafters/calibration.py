"""Calibration of both estimators (appendix B): read and written as calibration.json beside a drafter's weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_forespark.files import write_text


@dataclass(frozen=True)
class Calibration:
    """scale, bias: one pair for every pre-draft logit (sigmoid(a z + b), eq. 3). temperature: theta_j, [K] (eq. 6).

    mean_survival: [K] survival of full-length drafts on the calibration prompts; what a request without any estimate
    is given. source: where the numbers come from, in words.
    """

    scale: np.ndarray
    bias: np.ndarray
    temperature: np.ndarray
    mean_survival: np.ndarray
    source: str = "identity (not calibrated)"

    @classmethod
    def identity(cls, block: int, outputs: int) -> Calibration:
        """No correction; a drafter that was never calibrated still runs."""
        ones = np.ones(outputs, np.float32)
        return cls(
            ones, np.zeros_like(ones), np.ones(block, np.float32), 0.5 ** np.arange(1, block + 1, dtype=np.float32)
        )

    def save(self, path: Path) -> None:
        data = {
            "source": self.source,
            "pre_draft": {"scale": self.scale.tolist(), "bias": self.bias.tolist()},
            "post_draft": {"temperature": self.temperature.tolist()},
            "mean_survival": self.mean_survival.tolist(),
        }
        write_text(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, block: int, outputs: int) -> Calibration:
        """Raises ValueError naming the file and the field whose length is wrong."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}); run `forespark calibrate` again") from None
        try:
            fields = {
                "scale": (data["pre_draft"]["scale"], outputs),
                "bias": (data["pre_draft"]["bias"], outputs),
                "temperature": (data["post_draft"]["temperature"], block),
                "mean_survival": (data["mean_survival"], block),
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: field {error} is missing; run `forespark calibrate` again") from None
        arrays = {}
        for name, (values, length) in fields.items():
            arrays[name] = np.asarray(values, np.float32)
            if arrays[name].shape != (length,) or not np.isfinite(arrays[name]).all():
                raise ValueError(
                    f"{path}: {name} needs {length} finite numbers, has shape {arrays[name].shape}; "
                    "run `forespark calibrate` again"
                )
        return cls(**arrays, source=data.get("source", ""))
