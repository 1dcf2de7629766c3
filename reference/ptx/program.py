"""A kernel's instructions as the core executes them: register offsets, constants, encoded operands."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from .encoders import bits_of
from .fusion import Encoded, fused
from .instructions import encode
from .parser import Address, Immediate, Instruction, Kernel, Module, PtxError, Register, Symbol, Variable

SHARED_BASE = 1024  # core/machine.h


class Insn(ctypes.Structure):
    """Mirrors Insn in core/machine.h."""

    _fields_ = [
        ("execute", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("registers", ctypes.c_void_p),
        ("n_registers", ctypes.c_int32),
        ("n_written", ctypes.c_int32),
        ("guard", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


class Memory:
    """Bytes at a fixed, aligned address."""

    def __init__(self, data: bytes, align: int = 256):
        self._raw = np.zeros(len(data) + align, np.uint8)
        self.start = self._raw.ctypes.data + (-self._raw.ctypes.data) % align
        self.array = self._raw[self.start - self._raw.ctypes.data :][: len(data)]
        self.array[:] = np.frombuffer(data, np.uint8)


class Program:
    """One kernel, encoded. The parts that stay the same for every launch."""

    def __init__(self, module: Module, kernel: Kernel, core):
        self.module, self.kernel = module, kernel
        self._core = core
        self.constants = bytearray()
        self.relocations: list[int] = []
        self._constant_at: dict = {}
        self._lay_out_registers()
        self._lay_out_variables()
        self.ops: list[str] = []
        self._encode()

    # ---- layout ----
    def _lay_out_registers(self) -> None:
        """Predicates take 4 bytes (a bit per lane), the others 32 lanes each.

        Every register also has a number, for the checks of registers that an asynchronous instruction still uses.
        """
        self.offsets: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        offset = 0
        for name, kind in self.kernel.registers.items():
            width = 1 if kind == "pred" else max(16, bits_of(kind))
            if width > 64:
                continue  # declared by the compiler; an instruction that names one is "not implemented"
            size = 4 if width == 1 else 4 * width
            offset = _align(offset, 4 if width == 1 else 64)
            self.offsets[name], self.widths[name], self.numbers[name] = offset, width, len(self.numbers)
            offset += size
        self.register_bytes = _align(max(offset, 64), 64)

    def _lay_out_variables(self) -> None:
        self.symbols: dict[str, tuple[str, int]] = {}
        offset = 0
        for p in self.kernel.parameters:
            offset = _align(offset, p.align)
            self.symbols[p.name] = ("param", offset)
            p.offset = offset
            offset += p.size
        self.param_bytes = offset
        static = SHARED_BASE
        dynamic: list[Variable] = []
        local = 0
        data = bytearray()
        places = []
        for v in [*self.module.variables, *self.kernel.variables]:
            if v.space == "shared" and v.size:
                static = _align(static, v.align)
                self.symbols[v.name] = ("shared", static)
                static += v.size
            elif v.space == "shared":
                dynamic.append(v)
            elif v.space == "local":
                local = _align(local, v.align)
                self.symbols[v.name] = ("local", local)
                local += v.size
            else:
                data.extend(bytes(-len(data) % max(v.align, 16)))
                places.append((v.name, len(data)))
                data.extend(v.data.ljust(v.size, b"\0"))
        for v in dynamic:  # dynamic shared memory starts after the static variables, at its own alignment
            static = _align(static, v.align)
            self.symbols[v.name] = ("shared", static)
        self.dynamic_start = static
        self.static_shared = static - SHARED_BASE
        self.local_bytes = _align(local, 16)
        self.globals = Memory(bytes(data) or b"\0")
        for name, at in places:
            self.symbols[name] = ("global", self.globals.start + at)

    # ---- operands: what the instruction table calls ----
    def _note(self, register: str, written: bool) -> None:
        if register in self.numbers:
            (self._written if written else self._read).append(self.numbers[register])

    def _offset(self, name: str) -> int:
        if name not in self.offsets:
            raise PtxError(f"not implemented: register {name}")
        return self.offsets[name]

    def width(self, operand) -> int | None:
        return self.widths.get(operand.name) if isinstance(operand, Register) else None

    def number(self, operand) -> int:
        return self.numbers[operand.name]

    def destination(self, operand, bits: int | None) -> int:
        if isinstance(operand, Register) and operand.name == "_":
            return -1
        if not isinstance(operand, Register):
            raise PtxError("not implemented (destination)")
        if bits is not None and self.widths.get(operand.name) != bits:
            raise PtxError(f"register {operand.name} is not {bits} bits wide")
        self._note(operand.name, True)
        return self._offset(operand.name)

    def update(self, operand, bits: int) -> int:
        """A register that is both read and written."""
        return self.destination(operand, bits)

    def source(self, operand, kind: str | None) -> int:
        if isinstance(operand, Register):
            self._note(operand.name, False)
            offset = self._offset(operand.name)
            if kind is not None and self.widths[operand.name] != max(16, bits_of(kind)):
                raise PtxError(f"register {operand.name} does not have the width of {kind}")
            return offset
        if isinstance(operand, Symbol):
            return self._symbol(operand, bits_of(kind) if kind else 64)
        if isinstance(operand, Immediate):
            return self._constant(operand.value, kind or "b32")
        raise PtxError("not implemented (operand)")

    def predicate(self, operand) -> int:
        if isinstance(operand, Immediate):
            return self.constant_predicate(operand.value)
        self._note(operand.name, False)
        return self._offset(operand.name) << 1 | int(operand.negated)

    def constant_predicate(self, value: int) -> int:
        return ~self._pool(struct.pack("<I", 0xFFFFFFFF if value else 0) * 16, "pred") << 1

    def predicate_destination(self, operand) -> int:
        if operand.name == "_":
            return -1
        self._note(operand.name, True)
        return self._offset(operand.name)

    def address(self, operand) -> list[int]:
        base = operand.base if isinstance(operand, Address) else operand
        offset = operand.offset if isinstance(operand, Address) else 0
        if isinstance(base, Immediate):
            return [self._constant(base.value, "b64"), 1, offset]
        if isinstance(base, Symbol):
            return [self._symbol(base), 1, offset]
        return [self.source(base, None), int(self.widths[base.name] == 64), offset]

    def label(self, operand) -> int:
        if operand.name not in self.kernel.labels:
            raise PtxError(f"no label {operand.name}")
        return self.kernel.labels[operand.name]

    def table(self, operand) -> list[int]:
        return [self.kernel.labels[t] for t in self.kernel.tables[operand.name]]

    def _symbol(self, symbol: Symbol, bits: int = 64) -> int:
        if symbol.name not in self.symbols:
            raise PtxError(f"not implemented: symbol {symbol.name}")
        space, at = self.symbols[symbol.name]
        data = (at + symbol.offset).to_bytes(8, "little")[: bits // 8] * 32
        known = len(self._constant_at)
        place = self._pool(data, space, bits)
        if (
            space == "shared" and len(self._constant_at) > known
        ):  # a shared address also names its CTA: the scheduler adds the rank
            self.relocations.append(place << 1 | int(bits == 64))
        return ~place

    def _constant(self, value, kind: str) -> int:
        bits = max(16, bits_of(kind))
        if kind in ("f32", "f64") and not isinstance(value, int):
            raw = getattr(value, "bits", None)
            data = (
                raw.to_bytes(bits // 8, "little")
                if raw is not None
                else struct.pack("<f" if bits == 32 else "<d", value)
            )
        elif isinstance(value, float):
            raw = getattr(value, "bits", None)
            data = raw.to_bytes(4, "little") if raw is not None else struct.pack("<f" if bits == 32 else "<d", value)
        else:
            data = (value & (1 << bits) - 1).to_bytes(bits // 8, "little")
        return ~self._pool(data * 32, bits)

    def _pool(self, data: bytes, *key) -> int:
        key = (*key, data)
        if key not in self._constant_at:
            self.constants.extend(bytes(-len(self.constants) % 64))
            self._constant_at[key] = len(self.constants)
            self.constants.extend(data)
        return self._constant_at[key]

    # ---- encoding ----
    def _encode(self) -> None:
        encoded = []
        for instruction in self.kernel.instructions:
            self._written, self._read, self.convergent = [], [], False
            try:
                op, args, flags = encode(self, instruction.opcode, instruction.operands)
                guard = -1 if instruction.guard is None else self.predicate(instruction.guard)
                handler = self._core.handler(op)
            except (PtxError, AttributeError, IndexError, KeyError, TypeError) as error:
                encoded.append((instruction, None, self._refusal(instruction, error)))
                self.ops.append("not implemented")
                continue
            self.ops.append(op)
            encoded.append(
                (instruction, handler, (args, flags, guard, [*self._written, *self._read], len(self._written)))
            )
        self._fuse(encoded)
        self.refusals = {i: what for i, (_, handler, what) in enumerate(encoded) if handler is None}
        self.constants.extend(bytes(-len(self.constants) % 64 + 64))
        self.constant_memory = Memory(bytes(self.constants))
        flat: list[int] = []
        places = []
        for _, handler, what in encoded:
            if handler is None:
                places.append((0, 0))
                continue
            args, registers = what[0], what[3]
            places.append((len(flat), len(flat) + len(args)))
            flat.extend(args)
            flat.extend(registers)
        self.arguments = np.array(flat or [0], np.int64)
        if self.arguments.min() < -(1 << 31) or self.arguments.max() >= 1 << 31:
            self.arguments = ((self.arguments + (1 << 31)) % (1 << 32)) - (1 << 31)
        self.arguments = self.arguments.astype(np.int32)
        base = self.arguments.ctypes.data
        self.code = (Insn * (len(encoded) + 1))()
        for i, (instruction, handler, what) in enumerate(encoded):
            insn = self.code[i]
            insn.line = instruction.line
            insn.guard = -1
            if handler is None:
                insn.execute = self._core.handler("refuse")
                continue
            args, flags, guard, registers, written = what
            insn.execute, insn.flags, insn.guard = handler, flags, guard
            insn.args, insn.registers = base + 4 * places[i][0], base + 4 * places[i][1]
            insn.n_registers, insn.n_written = len(registers), written
        last = self.code[len(encoded)]  # falling off the end is a return
        last.execute, last.guard = self._core.handler("exit"), -1

    def _fuse(self, encoded: list) -> None:
        """Sums that ptxas fuses with a product are executed so; the product stays."""
        seen = [
            Encoded(instruction.opcode, what[2] != -1, what[3][: what[4]], what[3][what[4] :]) if handler else None
            for instruction, handler, what in encoded
        ]
        handler = self._core.handler("fused_f32")
        for i, u in list(fused(seen, set(self.kernel.labels.values()))):
            (_, x, y, _), product = encoded[i][2][0], encoded[i][2][0][0]
            instruction, (d, left, right, flags) = encoded[u][0], encoded[u][2][0]
            first = left == product
            minus = instruction.opcode.startswith("sub")
            args = [d, x, y, right if first else left, flags, int(minus and not first), int(minus and first)]
            registers = [*seen[u].written, *seen[i].read, *(r for r in seen[u].read if r not in seen[i].written)]
            encoded[u] = (instruction, handler, (args, *encoded[u][2][1:3], registers, 1))

    @staticmethod
    def _refusal(instruction: Instruction, error: Exception) -> str:
        reason = str(error)
        detail = (
            f" ({reason})"
            if reason and not reason.startswith("not implemented")
            else reason.removeprefix("not implemented")
        )
        return f"not implemented: {instruction.opcode}, line {instruction.line}{detail}"
