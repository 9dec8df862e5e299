"""An NPU in host memory: every aten operator that torch_npu registers runs on the CPU, over the same bytes.

torch_npu itself stays: its tensors, allocator, streams and events, and the schemas of its operators. What
would launch a kernel is replaced. Two ways to run:

    at once     an operator is computed when it is called
    held back   an operator is queued on its stream, and runs when somebody waits for it, so code that
                forgets to wait reads what is not there yet (streams.py)

What a device would have made the host wait for is logged, with the line of code that asked for it. Values
are a CPU's: nothing is said of an NPU's rounding, speed or memory order.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.npu import references
from tests.npu.streams import Streams

NPU, CPU = torch.device("npu", 0), torch.device("cpu")
# torch_npu's transfer_to_npu, which SGLang loads, wraps these in Python.
_empty, _empty_strided = torch.empty, torch.empty_strided
KINDS = (
    *("sync device", "sync stream", "sync event", "copy", "copy async", "set", "allocate", "release"),
    *("record", "wait", "query"),
)
"""Of the stand-in runtime, in the order of cann/stub.c."""

# Views, and what only touches a tensor's metadata or asks for memory: torch_npu's own code does it.
_METADATA = {
    *("empty.memory_format", "empty_strided", "resize_", "set_", "record_stream", "is_pinned", "_pin_memory"),
    *("_reshape_alias", "as_strided", "view", "unfold", "alias", "_has_compatible_shallow_copy_type"),
    *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "empty_like"),
}
_COPIES = {"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"}
_SIZE_FROM_DATA = {
    *("nonzero", "masked_select", "unique_consecutive", "_unique2", "repeat_interleave.Tensor", "bincount"),
    *("_local_scalar_dense", "equal", "is_nonzero", "unique_dim", "_unique"),
}
_INDEXING = {"index.Tensor", "index_put_", "index_put", "_index_put_impl_", "index_put.out"}


@dataclass(frozen=True)
class Note:
    """One thing the host did. where: the innermost line outside torch and these tests."""

    kind: str
    what: str
    bytes: int
    where: str


@dataclass
class Log:
    """waits: the host had to wait for the device. copies: between host and device. fallbacks: operators that
    torch_npu runs on the host. results: new tensors. stored: bytes written to watched tensors."""

    waits: list[Note] = field(default_factory=list)
    copies: list[Note] = field(default_factory=list)
    fallbacks: list[Note] = field(default_factory=list)
    allocations: list[Note] = field(default_factory=list)
    results: list[Note] = field(default_factory=list)
    launches: int = 0
    watched: dict[int, str] = field(default_factory=dict)
    stored: Counter[str] = field(default_factory=Counter)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Count the bytes that operators store in this tensor, as `stored[name]`."""
        self.watched[tensor.untyped_storage().data_ptr()] = name


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _where() -> str:
    """The innermost frame in SGLang or in this project, and the innermost of this project if another."""
    frame = sys._getframe(1)
    found: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if "/sglang_k3/" in path or "/sglang/" in path:
            short = path[path.rindex("/sglang") + 1 :]
            line = f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
            if not found:
                found.append(line)
            if "/sglang_k3/" in path and "upstream.py" not in path:
                if line != found[0]:
                    found.append(line)
                break
        frame = frame.f_back
    return " < ".join(found) or "tests"


class Emulator:
    """One a process: `install()` it before the first NPU tensor computes anything."""

    def __init__(self) -> None:
        self.log: Log | None = None
        self.streams: Streams | None = None
        self._runtime = ctypes.CDLL("libascendcl.so")
        self._generators: dict[Any, torch.Generator] = {}
        self._libraries: list[torch.library.Library] = []
        self._interpreted: set[str] = set()
        self._raw_stream: Callable[[int], int] = importlib.import_module(
            "torch_npu"
        )._C._npu_getCurrentRawStream
        listener = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64
        )
        self._listener = listener(self._heard)

    def install(self) -> None:
        """Replace the kernels. Operators of torch_npu's own namespace get references.py."""
        aten, npu = (torch.library.Library(name, "IMPL") for name in ("aten", "npu"))
        self._libraries += [aten, npu]
        registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"))
        differentiated = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutogradPrivateUse1"))
        for name in registered | _left_to_the_host(registered):
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            if namespace not in ("aten", "npu"):
                continue
            op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
            if op is None or (namespace == "aten" and (rest in _METADATA or op.is_view)):
                continue
            kernel = self._call if name in registered else self._fallback
            if namespace == "aten" and rest in _COPIES:
                kernel = self._copy
            library = aten if namespace == "aten" else npu
            library.impl(rest, partial(kernel, op), "PrivateUse1", allow_override=True)
            if namespace == "aten" and name in differentiated:
                # On a 950 torch_npu launches from there.
                library.impl(rest, partial(kernel, op), "AutogradPrivateUse1", allow_override=True)
        self._runtime.stub_listen(self._listener)

    def provide(self, namespace: str, schema: str, meta: Callable[..., Any]) -> None:
        """An operator of a package that is not here. schema: as the package declares it. meta: its results'
        shapes. What it computes is in references.py, under NAMESPACE::NAME (or NAME for npu)."""
        library = torch.library.Library(namespace, "FRAGMENT")
        self._libraries.append(library)
        name = library.define(schema)
        library.impl(name, meta, "Meta")
        op = getattr(getattr(torch.ops, namespace), name).default
        names = [argument.name for argument in op._schema.arguments]

        def by_name(*args: Any, **kwargs: Any) -> Any:
            return self._call(op, **dict(zip(names, args, strict=False)), **kwargs)

        library.impl(name, by_name, "PrivateUse1")

    def interpret(self, namespace: str) -> None:
        """Operators whose kernels Triton's interpreter runs: over the same bytes, as the rest. Each is
        computed as it is for CPU tensors, and what it writes is what its schema says."""
        self._interpreted.add(namespace)
        library = torch.library.Library(namespace, "IMPL")
        self._libraries.append(library)
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith(f"{namespace}::"):
                continue
            packet, _, overload = name.partition("::")[2].partition(".")
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            library.impl(packet, partial(self._call, op), "PrivateUse1")

    # --- what the runtime says ---------------------------------------------------------------------------

    def _heard(self, kind: int, first: int, second: int, size: int) -> int:
        name = KINDS[kind]
        if self.log is not None:
            if name.startswith("sync"):
                self.log.waits.append(Note(name, "", 0, _where()))
            elif name == "allocate":
                self.log.allocations.append(Note(name, "", size, _where()))
        return 1 if self.streams is None else self.streams.heard(name, first, second, _where)

    @contextmanager
    def logging(self) -> Iterator[Log]:
        """Note what happens inside."""
        self.log = log = Log()
        try:
            yield log
        finally:
            self.log = None

    @contextmanager
    def held_back(self, seed: int, drop: str | None = None) -> Iterator[Streams]:
        """Queue operators inside, by the order that `seed` chooses; everything is done at the end. drop: see
        `Streams`."""
        self.streams = streams = Streams(seed, drop)
        try:
            yield streams
            streams.drain_all()
        finally:
            self.streams = None

    # --- operators ---------------------------------------------------------------------------------------

    def _note(self, kind: str, what: str, size: int = 0) -> None:
        if self.log is not None:
            note = Note(kind, what, size, _where())
            {"wait": self.log.waits, "copy": self.log.copies, "fallback": self.log.fallbacks}[kind].append(
                note
            )

    def _fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self._note("fallback", op.name())
        self._wait(op.name())
        return self._at_once(op, args, kwargs)

    def _wait(self, what: str) -> None:
        """The host needs a value now."""
        self._note("wait", what)
        if self.streams is not None:
            self.streams.drain(self._raw_stream(0))

    def _function(self, op: Any) -> Callable[..., Any]:
        if op.namespace in ("aten", *self._interpreted):
            return op
        name = op._schema.name
        reference = references.REFERENCES.get(name.removeprefix("npu::"))
        if reference is None:
            raise NotImplementedError(f"{name} has no reference in tests/npu/references.py")
        return reference

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        name = op.name().partition("::")[2]
        if name in _SIZE_FROM_DATA or (name in _INDEXING and _by_mask(args[1])):
            self._wait(op.name())
            return self._at_once(op, args, kwargs)
        if self.log is not None:
            self.log.launches += 1
        if self.streams is None:
            return self._at_once(op, args, kwargs)
        if op.namespace != "aten":
            return self._now(op, args, kwargs)
        return self._queued(op, args, kwargs)

    def _now(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What cannot be queued is computed when it is called, behind its stream; to the clocks it is a
        launch like any other."""
        assert self.streams is not None
        stream = self._raw_stream(0)
        self.streams.drain(stream, waited=False)
        result = self._at_once(op, args, kwargs)
        reads, writes = _accesses(op, args, kwargs)
        writes |= {leaf.untyped_storage().data_ptr() for leaf in _leaves(result) if _is_npu(leaf)} - reads
        self.streams.launched(stream, f"{op.name()} ({_where()})", reads, writes)
        return result

    def _to_host(self, alias: dict[int, tuple[torch.Tensor, torch.Tensor]], value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != "npu":
                return value
            twin = host(value)
            alias[id(twin)] = twin, value
            return twin
        if isinstance(value, list | tuple):
            return [self._to_host(alias, each) for each in value]
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            return self._generator(value)
        if isinstance(value, torch.device) and value.type == "npu":
            return CPU
        return value

    def _generator(self, given: torch.Generator) -> torch.Generator:
        seed = given.initial_seed()
        kept = self._generators.get(id(given))
        if kept is None or kept.initial_seed() != seed:
            kept = torch.Generator()
            kept.manual_seed(seed)
            self._generators[id(given)] = kept
        return kept

    def _at_once(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        alias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        given = [self._to_host(alias, value) for value in args]
        named = {key: self._to_host(alias, value) for key, value in kwargs.items() if key != "pin_memory"}
        result = self._function(op)(*given, **named)
        for twin, original in alias.values():
            # An `out` argument of another size is given room by the operator.
            if twin.shape != original.shape:
                original.resize_(twin.shape)
                host(original).copy_(twin)

        def back(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(back(each) for each in value)
            if not isinstance(value, torch.Tensor):
                return value
            kept = alias.get(id(value))
            return place(value) if kept is None else kept[1]

        result = back(result)
        self._count(op, args, result, {id(original) for _, original in alias.values()})
        return result

    def _count(self, op: Any, args: tuple, result: Any, owned: Collection[int]) -> None:
        """owned: ids of the tensors that the operator was given."""
        if self.log is None:
            return
        for value in _leaves(result):
            if id(value) not in owned:
                self.log.results.append(Note("result", op.name(), value.nbytes, _where()))
            elif (name := self.log.watched.get(value.untyped_storage().data_ptr())) is not None:
                # A scatter stores what it was given; others write all of what they return.
                by_index = op.name().partition("::")[2] in _INDEXING or "scatter" in op.name()
                self.log.stored[name] += args[2].nbytes if by_index else value.nbytes

    def _queued(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Allocate the results now, by the operator's meta kernel; compute them when the stream does."""
        assert self.streams is not None
        alias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def shape_only(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and (_is_npu(value) or value.dim()):
                twin = _empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                alias[id(twin)] = twin, value
                return twin
            if isinstance(value, torch.device) and value.type == "npu":
                return torch.device("meta")
            return None if isinstance(value, torch.Generator) else value

        named = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        try:
            shaped = op(
                *_mapped(shape_only, args),
                **{key: _mapped(shape_only, value) for key, value in named.items()},
            )
        except (NotImplementedError, RuntimeError):
            # No meta kernel: nothing can be said about the result before it is there.
            return self._now(op, args, kwargs)
        for twin, original in alias.values():
            if twin.shape != original.shape:
                original.resize_(twin.shape)

        def room(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in alias:
                return alias[id(value)][1]
            return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=NPU)

        results = _mapped(room, shaped)
        # Addresses, not tensors: memory that was given back early must be free to be written over.
        call = _mapped(self._by_address, args)
        call_named = {key: _mapped(self._by_address, value) for key, value in named.items()}
        targets = [
            Address.of(value)
            for value in _leaves(results)
            if not any(value is kept for _, kept in alias.values())
        ]

        def work() -> None:
            given_named = {key: _mapped(_at_address, value) for key, value in call_named.items()}
            computed = op(*_mapped(_at_address, call), **given_named)
            if targets:
                for address, value in zip(targets, _leaves(computed), strict=True):
                    address.tensor().copy_(value)

        reads, writes = _accesses(op, args, kwargs)
        writes |= {target.pointer for target in targets}
        self.streams.push(self._raw_stream(0), work, f"{op.name()} ({_where()})", reads, writes)
        return results

    def _by_address(self, value: Any) -> Any:
        if _is_npu(value):
            return Address.of(value)
        if isinstance(value, torch.Tensor):
            return value.clone()
        return self._to_host({}, value)

    # --- copies ------------------------------------------------------------------------------------------

    def _copy(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        name = op.name().partition("::")[2]
        if name == "_to_copy":
            source = args[0]
            device = torch.device(kwargs.get("device") or source.device)
            layout = kwargs.get("memory_format")
            if layout in (None, torch.preserve_format) and source.is_contiguous():
                shaped = source
            else:
                shaped = torch.ops.aten._to_copy(
                    _empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"),
                    memory_format=layout,
                )
            target = _empty_strided(
                shaped.shape,
                shaped.stride(),
                dtype=kwargs.get("dtype") or source.dtype,
                device=NPU if device.type == "npu" else device,
                pin_memory=bool(kwargs.get("non_blocking")) and device.type == "cpu",
            )
            return self._move(target, source, bool(kwargs.get("non_blocking")))
        if name == "copy_":
            target, source, *rest = args
            return self._move(target, source, bool(rest[0] if rest else kwargs.get("non_blocking", False)))
        source, target, *rest = args
        if target.shape != source.shape:
            target.resize_(source.shape)
        return self._move(target, source, bool(rest[0] if rest else kwargs.get("non_blocking", False)))

    def _move(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        crosses = _is_npu(target) != _is_npu(source)
        if crosses:
            way = "to device" if _is_npu(target) else "to host"
            size = source.numel() * source.element_size()
            if non_blocking and _pinned(source if way == "to device" else target):
                self._note("copy", f"{way}, async", size)
            else:
                # Unpinned memory, or a caller who wants it now: the host waits for the stream.
                self._note("copy", way, size)
                self._wait(f"copy {way}")
                host(target).copy_(host(source))
                return target
        if self.log is not None:
            self.log.launches += 1
            if (watched := self.log.watched.get(target.untyped_storage().data_ptr())) is not None:
                self.log.stored[watched] += target.nbytes
        if self.streams is None:
            host(target).copy_(host(source))
            return target
        to, from_ = Address.of(target), Address.of(source)
        keep = (target if not _is_npu(target) else None, source if not _is_npu(source) else None)

        def work() -> None:
            assert keep is not None
            to.tensor().copy_(from_.tensor())

        self.streams.push(self._raw_stream(0), work, f"copy ({_where()})", {from_.pointer}, {to.pointer})
        return target


def _left_to_the_host(registered: set[str]) -> set[str]:
    """Operators that torch_npu has no kernel for and torch none that would do: it runs them on the host."""
    composite = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("aten::")
        and name not in registered
        and not any(has(name, key) for key in (*composite, "CompositeImplicitAutograd"))
    }


# --- memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """Where a tensor lies, without keeping it alive."""

    pointer: int
    bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Address:
        storage = tensor.untyped_storage()
        return Address(
            storage.data_ptr(),
            storage.nbytes(),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )

    def tensor(self) -> torch.Tensor:
        """The bytes as a CPU tensor."""
        if self.bytes == 0:
            return _empty_strided(self.shape, self.strides, dtype=self.dtype)
        storage = torch._C._construct_storage_from_data_pointer(self.pointer, CPU, self.bytes)
        return _empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """change, in lists and tuples element by element."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, each) for each in value)
    return change(value)


def _at_address(value: Any) -> Any:
    return value.tensor() if isinstance(value, Address) else value


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a CPU tensor; a CPU tensor is itself."""
    if tensor.device.type != "npu":
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    twin = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, size)
    empty = _empty(0, dtype=tensor.dtype)
    return empty.set_(twin, tensor.storage_offset(), tensor.shape, tensor.stride())


def place(value: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor on the device, with its strides."""
    target = _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=NPU)
    host(target).copy_(value)
    return target


def _pinned(tensor: torch.Tensor) -> bool:
    return tensor.is_pinned()


def _by_mask(indices: Any) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


def _accesses(op: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Addresses of the memory that a call reads, and that it writes by its schema."""
    reads, writes = set(), set()
    for position, argument in enumerate(op._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        for tensor in _leaves(given):
            if _is_npu(tensor):
                kind = writes if alias is not None and alias.is_write else reads
                kind.add(tensor.untyped_storage().data_ptr())
    return reads, writes


def _leaves(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]
