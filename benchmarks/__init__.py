"""Measurements of what the package computes, and the gate that compares two of them.

    python -m benchmarks.kernels            every operator of the serving path, on this machine
    python -m benchmarks.compare OLD NEW    did an operator get slower?

What every figure means: docs/benchmarks.md.
"""

from __future__ import annotations

import os

# Must stand before torch and numba load their OpenMP runtimes, whose idle threads would otherwise spin on
# the cores that the other one needs. A server sets the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
