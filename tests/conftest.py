"""Shared by all tests: a small thread count."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
