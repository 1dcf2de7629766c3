"""The boundary: runs a compiled object's own host code on the CPU and catches its launches.

The object is linked with stand-ins for the CUDA calls (stubs.c). Tensors are host memory that claims to lie on a CUDA
device.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from dataclasses import dataclass

from .core import build

_STUBS = pathlib.Path(__file__).parent / "stubs.c"


@dataclass
class Launch:
    """What one launch hands over. `parameters` are the addresses of the kernel's parameters."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    parameters: int
    programmatic: bool = False

    def parameter(self, index: int, size: int) -> bytes:
        pointer = ctypes.c_void_p.from_address(self.parameters + 8 * index).value
        return ctypes.string_at(pointer, size)


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _read_launch(config: int, kernel: bytes, parameters: int) -> Launch:
    """cudaLaunchConfig_t: grid and block (6 x 32 bits), shared bytes at 24, attributes at 40 and their number at 48.

    An attribute has 72 bytes: its kind, then its values from byte 8.
    """
    dims = (ctypes.c_uint32 * 6).from_address(config)
    launch = Launch(
        kernel.decode(),
        tuple(dims[:3]),
        tuple(dims[3:]),
        (1, 1, 1),
        ctypes.c_size_t.from_address(config + 24).value,
        parameters,
    )
    attributes = ctypes.c_void_p.from_address(config + 40).value
    for i in range(ctypes.c_uint.from_address(config + 48).value):
        raw = ctypes.string_at(attributes + 72 * i, 72)
        kind, values = (
            int.from_bytes(raw[:4], "little"),
            [int.from_bytes(raw[8 + 4 * k : 12 + 4 * k], "little") for k in range(3)],
        )
        if kind == 4:  # cudaLaunchAttributeClusterDimension
            launch.cluster = tuple(max(1, v) for v in values)
        elif kind == 6:  # cudaLaunchAttributeProgrammaticStreamSerialization
            launch.programmatic = bool(values[0])
    return launch


# ---- tensors: DLPack's structures, claiming a CUDA device ----
class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


class CudaClaim:
    """A CPU tensor that says through DLPack that it lies on CUDA device 0. The tensor's memory must outlive the use."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        """One malloc holds DLManagedTensor, shape and strides, so that its deleter is C's free.

        A deleter in Python could be called after the interpreter's end.
        """
        code, bits = _dlpack_type(self.tensor.dtype)
        n, header = self.tensor.dim(), ctypes.sizeof(_Managed)
        block = _libc.malloc(header + 16 * n)
        shape, strides = (
            (ctypes.c_int64 * n).from_address(block + header),
            (ctypes.c_int64 * n).from_address(block + header + 8 * n),
        )
        shape[:], strides[:] = self.tensor.shape, self.tensor.stride()
        managed = _Managed.from_address(block)
        managed.tensor = _DLTensor(self.tensor.data_ptr(), _Device(2, 0), n, _DType(code, bits, 1), shape, strides, 0)
        managed.context, managed.deleter = None, ctypes.cast(_libc.free, ctypes.c_void_p).value
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(block, b"dltensor", None)

    def __dlpack_device__(self):
        return (2, 0)


def _dlpack_type(dtype) -> tuple[int, int]:
    name = str(dtype).removeprefix("torch.")
    codes = {"bfloat16": (4, 16), "bool": (6, 8), "uint8": (1, 8), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8)}
    if name in codes:
        return codes[name]
    return (2 if name.startswith("float") else 0, int("".join(c for c in name if c.isdigit())))


# ---- calling ----
@dataclass
class HostCode:
    """A linked object: its host functions, and who gets the launches."""

    library: ctypes.CDLL
    module: object
    callback: object = None

    def call(self, symbol: str, args: list, on_launch) -> None:
        """Calls the object's host function; launches go to on_launch(Launch). An exception there is raised here."""
        import tvm_ffi

        errors: list[BaseException] = []

        def caught(config, kernel, parameters):
            try:
                if not errors:
                    on_launch(_read_launch(config, kernel, parameters))
            except BaseException as error:  # it must not cross the C code: raised again below
                errors.append(error)
            return 0

        self.callback = _LAUNCH(caught)
        self.library.set_launch_callback(self.callback)
        claims = [CudaClaim(a) if hasattr(a, "data_ptr") else None for a in args]
        passed = [tvm_ffi.from_dlpack(c) if c else a for c, a in zip(claims, args, strict=True)]
        try:
            self.module[symbol](*passed)
        except Exception:
            if not errors:
                raise
        if errors:
            raise errors[0]


def load(object_path) -> HostCode:
    """Links an object file with the stand-ins (once per content) and loads it."""
    stat = pathlib.Path(object_path).stat()
    return _load(str(object_path), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _load(object_path: str, *_version) -> HostCode:
    import tvm_ffi

    ffi = pathlib.Path(tvm_ffi.__file__).parent / "lib"
    # -Bsymbolic binds the object to the stand-ins: `import cutlass` may have loaded the real runtime globally.
    flags = ["-shared", "-fPIC", "-O1", "-w", "-mcmodel=large", "-Wl,-Bsymbolic"]
    path = build([_STUBS, pathlib.Path(object_path)], flags, "kernel", [f"-L{ffi}", "-ltvm_ffi", f"-Wl,-rpath,{ffi}"])
    return HostCode(ctypes.CDLL(str(path)), tvm_ffi.load_module(str(path)))
