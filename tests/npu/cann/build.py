"""Builds the stand-in CANN libraries that torch_npu links against, with gcc, in about a second.

    python -m tests.npu.cann.build DIRECTORY      then run with LD_LIBRARY_PATH=DIRECTORY

Which names they have to define is read off the installed torch_npu, so nothing here belongs to one version
of it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_OTHERS = ("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
"""Libraries that torch_npu is linked against beside libascendcl; it looks up names through each of them."""

_C_NAME = re.compile(r"^(?:acl|rt[A-Z]|Msprof|Hccl|hccl)\w*$")
_LOOKED_UP = re.compile(rb"\x00((?:acl(?:rt|mdl|op|Get|Set|prof)|Hccl)[A-Za-z]+)(?=\x00)")
_ABSENT = {"aclsysGetCANNVersion", "aclsysGetVersionStr", "aclGetCannAttribute", "aclGetCannAttributeList"}
"""Left out where only looked up: torch_npu then takes the runtime for an old one and asks it less."""

_DEFINED = re.compile(r"^(?:static )?(?:int|void|size_t|const char \*|uint64_t) ?\*?(\w+)\(", re.MULTILINE)


def installed() -> Path:
    """torch_npu's folder, found without importing it. Raises SystemExit."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise SystemExit("torch_npu is not installed: run `make test-npu`, which sets up its environment")
    return Path(spec.origin).parent


def names(folder: Path) -> set[str]:
    """Every C name that torch_npu's libraries leave undefined, or look up while they run."""
    found: set[str] = set()
    linked: set[str] = set()
    for library in (*folder.glob("lib/*.so"), *folder.glob("_C*.so")):
        printed = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        ).stdout
        symbols = {line.split()[-1].split("@")[0] for line in printed.splitlines()}
        linked |= {name for name in symbols if _C_NAME.match(name)}
        found |= {name.decode() for name in _LOOKED_UP.findall(library.read_bytes())}
    return linked | (found - _ABSENT)


def source(wanted: set[str]) -> str:
    """stub.c and a function that does nothing for each other name."""
    written = (_HERE / "stub.c").read_text()
    defined = set(_DEFINED.findall(written))
    rest = sorted(name for name in wanted if name not in defined and not name.startswith("aclnn"))
    return written + "\n" + "\n".join(f"int {name}(void) {{ return 0; }}" for name in rest) + "\n"


def build(target: Path) -> None:
    """Write libascendcl.so and its empty companions to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    code = target / "stub.c"
    code.write_text(source(names(installed())))
    compile_ = ["gcc", "-shared", "-fPIC", "-O1", "-w"]
    subprocess.run([*compile_, "-o", str(target / "libascendcl.so"), str(code)], check=True)
    empty = target / "empty.c"
    empty.write_text("")
    for name in _OTHERS:
        subprocess.run(
            [
                *(*compile_, "-Wl,--no-as-needed", "-o", str(target / f"{name}.so"), str(empty)),
                *(f"-L{target}", "-lascendcl"),
            ],
            check=True,
        )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
