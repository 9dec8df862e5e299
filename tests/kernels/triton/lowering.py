"""Lowers launches to what the NPU's compiler takes: run with triton-ascend as `triton`, see compiler.py.

python lowering.py LAUNCHES.json FOLDER

Each launch {"file", "kernel", "types", "constants"} becomes FOLDER/INDEX.ttadapter, or INDEX.error with the
reason.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def _kernel(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("kernels_" + Path(file).parent.name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def lower(launch: dict[str, Any]) -> str:
    """The launch's kernel in linalg, as triton-ascend hands it to bishengir-compile."""
    # The type checker looks at another triton, without this backend.
    from triton._C.libtriton import ir  # pyright: ignore
    from triton.backends.ascend import compiler  # pyright: ignore
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("npu", "Ascend910B3", 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({})
    source: Any = ASTSource(
        fn=_kernel(launch["file"], launch["kernel"]),
        signature=launch["types"],
        constants=launch["constants"],  # pyright: ignore
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = dict(options.__dict__, target=target)
    return compiler.ttir_to_linalg(
        compiler.make_ttir(module, metadata, options), metadata, options, named_ops=True
    )


def main(launches: Path, folder: Path) -> None:
    for index, launch in enumerate(json.loads(launches.read_text())):
        try:
            (folder / f"{index}.ttadapter").write_text(lower(launch))
        except subprocess.CalledProcessError as error:
            (folder / f"{index}.error").write_text((error.stderr or b"").decode(errors="replace"))
        except Exception as error:
            (folder / f"{index}.error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
