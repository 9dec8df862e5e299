"""Settings that must stand before torch and numba load their OpenMP runtimes."""

from __future__ import annotations

import os

# Two runtimes whose idle threads spin take the cores from one another: a test of many small calls took 22 s
# with the default and half a second with this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
