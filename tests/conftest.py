"""Shared by all tests: small thread counts, a tiny target and drafter."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
