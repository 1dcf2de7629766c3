"""PTX text to kernels: registers, variables, parameters, labels and instructions, each with its line."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field


class PtxError(Exception):
    """The PTX can't be read or executed."""


@dataclass(frozen=True)
class Register:
    """A register; `negated` for a predicate written with "!"."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A literal: integers as they are, floating-point literals as a float with their own bits."""

    value: int | float


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter or label, with a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """a|b: two destinations."""

    first: object
    second: object


@dataclass(frozen=True)
class Address:
    """[base + offset], or [base, {coordinates}] of a tensor copy."""

    base: object
    offset: int = 0
    coordinates: tuple = ()


@dataclass
class Instruction:
    opcode: str
    operands: list
    guard: Register | None
    line: int
    source: tuple[str, int] | None = None

    def __str__(self) -> str:
        return self.opcode


@dataclass
class Variable:
    name: str
    space: str
    size: int
    align: int
    data: bytes = b""


@dataclass
class Kernel:
    name: str
    parameters: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    threads: tuple[int, ...] | None = None  # of a block: so many at most, or exactly
    exact_threads: bool = False


@dataclass
class Module:
    target: str
    kernels: dict[str, Kernel]
    variables: list[Variable]
    lines: list[str]


SIZES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
}
_NAME = r"[A-Za-z_$%][\w$]*"
_DECLARATION = re.compile(
    rf"\.(?P<space>shared|global|const|local|param)\s*(?:\.align\s+(?P<align>\d+))?\s*\.(?P<type>\w+)\s+(?P<name>{_NAME})"
    r"\s*(?P<array>\[\s*\d*\s*\])?\s*(?:=\s*(?P<data>.*))?$",
    re.S,
)


_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_FUNCTION = re.compile(r"(\.visible|\.weak)?\s*\.(entry|func)\b")
_BRACKETS = re.compile(r"[\[\](){}]")
_DISPLACED = re.compile(rf"({_NAME})\s*([+-])\s*(-?\w+)")
_GUARD = re.compile(r"@\s*(!?)\s*(\S+)\s+(.*)", re.S)


def _number(text: str) -> int | float | None:
    if not text or text[0] not in "+-0123456789":
        return None
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return (
            struct.unpack("<f", int(text[2:], 16).to_bytes(4, "little"))[0]
            if not _is_nan32(text)
            else _NanBits(int(text[2:], 16), 32)
        )
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return struct.unpack("<d", int(text[2:], 16).to_bytes(8, "little"))[0]
    if re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0) if not re.fullmatch(r"[+-]?0\d+", text) else int(text, 8)
    if re.fullmatch(r"[+-]?\d+\.\d*([eE][+-]?\d+)?", text):
        return float(text)
    return None


def _is_nan32(text: str) -> bool:
    return int(text[2:], 16) & 0x7FFFFFFF > 0x7F800000


class _NanBits(float):
    """A NaN literal that keeps its payload."""

    def __new__(cls, bits: int, width: int):
        new = super().__new__(cls, float("nan"))
        new.bits, new.width = bits, width
        return new


def _split(text: str) -> list[str]:
    """Splits at the commas outside brackets and braces."""
    if not _BRACKETS.search(text):
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


class _Scope:
    """Names of one { } block: inline assembly declares registers and labels of its own."""

    def __init__(self, parent: _Scope | None, number: int):
        self.parent, self.suffix, self.names = parent, f"@{number}" if number else "", set()

    def resolve(self, name: str) -> str:
        scope = self
        while scope is not None:
            if name in scope.names:
                return name + scope.suffix
            scope = scope.parent
        return name


def _strip_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _tokens(text: str):
    """(statement or brace, line) in order; a statement ends with ";", a label with ":"."""
    line, i, n = 1, 0, len(text)
    while i < n:
        c = text[i]
        if c == "\n":
            line += 1
            i += 1
        elif c.isspace():
            i += 1
        elif text.startswith((".version", ".target", ".address_size", ".loc ", ".loc\t", ".file", ".section"), i):
            end = text.find("\n", i)
            end = n if end < 0 else end
            statement = text[i:end].strip()
            if statement.startswith(".section"):  # debugging sections end the code
                close = text.find("}", i)
                line += text.count("\n", i, close)
                i = close + 1
                continue
            yield statement, line
            i = end
        elif c in "{}":
            yield c, line
            i += 1
        else:
            label = _LABEL.match(text, i)
            if label:
                yield label.group(1) + ":", line
                i = label.end()
                continue
            depth, k = 0, i
            head = _FUNCTION.match(text, i)
            while k < n:  # braces inside a statement are vectors or initialisers, except for a function's body
                if text[k] == "{" and head:
                    break
                if text[k] in "{[(":
                    depth += 1
                elif text[k] in "}])":
                    depth -= 1
                elif text[k] == ";" and depth == 0:
                    break
                k += 1
            yield text[i:k].strip(), line
            line += text.count("\n", i, k)
            i = k if head else k + 1


_register = functools.lru_cache(maxsize=1 << 16)(Register)  # the same few thousand, again and again


def _operand(text: str, scope: _Scope, kernel: Kernel):
    text = text.strip()
    if text.startswith("%") and "|" not in text:
        return _register(scope.resolve(text))
    if text.startswith("{"):
        return Vector(tuple(_operand(t, scope, kernel) for t in _split(text[1:-1])))
    if text.startswith("["):
        parts = _split(text[1:-1])
        base, offset = parts[0], 0
        match = _DISPLACED.fullmatch(base)
        if match:
            base, offset = match.group(1), int(match.group(3), 0) * (-1 if match.group(2) == "-" else 1)
        coordinates = _operand(parts[1], scope, kernel) if len(parts) > 1 else None
        items = coordinates.items if isinstance(coordinates, Vector) else (coordinates,) if coordinates else ()
        return Address(_operand(base, scope, kernel), offset, items)
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first, scope, kernel), _operand(second, scope, kernel))
    number = _number(text)
    if number is not None:
        return Immediate(number)
    negated = text.startswith("!")
    name = scope.resolve(text.lstrip("!").strip())
    if name in kernel.registers or name.startswith("%") or name == "_":
        return Register(name, negated)
    match = re.fullmatch(rf"({_NAME})\s*\+\s*(\w+)", text)
    return Symbol(match.group(1), int(match.group(2), 0)) if match else Symbol(name)


def _declare(statement: str) -> Variable | None:
    match = _DECLARATION.search(statement)
    if not match:
        return None
    unit = SIZES[match["type"]]
    count = match["array"]
    digits = re.sub(r"\D", "", count) if count else ""
    size = unit * (int(digits) if digits else 0 if count else 1)
    data = b""
    if match["data"]:
        text = match["data"].strip()
        values = [_number(v) for v in _split(text[1:-1] if text.startswith("{") else text)]
        if any(v is None for v in values):
            raise PtxError(f"not implemented: the initialiser of {match['name']}")
        data = b"".join(
            struct.pack("<f" if unit == 4 else "<d", v)
            if isinstance(v, float)
            else (v & (1 << 8 * unit) - 1).to_bytes(unit, "little")
            for v in values
        )
    return Variable(match["name"], match["space"], size, int(match["align"] or unit), data)


_FILE = r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?'


def parse(text: str) -> Module:
    """Reads a PTX module."""
    lines = text.splitlines()
    module = Module("", {}, [], lines)
    files = {n: f"{a}/{b}" if b else a for n, a, b in re.findall(_FILE, text, re.M)}  # they may follow their use
    kernel: Kernel | None = None
    scope: _Scope | None = None
    blocks, pending, source = 0, None, None
    table: str | None = None
    for statement, line in _tokens(_strip_comments(text)):
        if statement.startswith(".target"):
            module.target = statement.split()[1].rstrip(",")
        elif statement.startswith((".version", ".address_size", ".pragma", ".file")):
            pass
        elif statement.startswith((".loc ", ".loc\t")):
            match = re.match(r"\.loc\s+(\d+)\s+(\d+)", statement)
            source = (files.get(match[1], "?"), int(match[2]))
        elif re.match(r"(\.visible|\.weak)?\s*\.entry\b", statement):
            match = re.search(rf"\.entry\s+({_NAME})\s*(?:\((.*?)\))?(.*)", statement, re.S)
            pending = Kernel(match[1])
            for part in _split(match[2] or ""):
                pending.parameters.append(
                    _declare(re.sub(r"\.ptr(\s*\.\w+)*?(\s*\.align\s+\d+)?(?=\s+[A-Za-z_$%])", "", part))
                )
            threads = re.search(r"\.(reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", match[3])
            if threads:
                pending.threads = tuple(int(t or 1) for t in threads.groups()[1:])
                pending.exact_threads = threads[1] == "reqntid"
            blocks = 0
        elif re.match(r"(\.visible|\.weak|\.extern)?\s*\.func\b", statement):
            pending = Kernel("")  # device functions are parsed and dropped: a call is "not implemented"
        elif statement == "{":
            if kernel is None:
                if pending is None:
                    raise PtxError(f"line {line}: a block outside a function")
                kernel, pending, source = pending, None, None
                scope = _Scope(None, 0)
            else:
                blocks += 1
                scope = _Scope(scope, blocks)
        elif statement == "}":
            scope = scope.parent
            if scope is None:
                if kernel.name:
                    module.kernels[kernel.name] = kernel
                kernel = None
        elif kernel is None:
            variable = _declare(statement)
            if variable is not None:
                module.variables.append(variable)
        elif statement.endswith(":"):
            name = statement[:-1]
            scope.names.add(name)
            kernel.labels[scope.resolve(name)] = len(kernel.instructions)
            table = name
        elif statement.startswith(".reg"):
            match = re.match(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.S)
            for name in _split(match[2]):
                count = re.fullmatch(r"(.*)<(\d+)>", name)
                for n in [f"{count[1]}{i}" for i in range(int(count[2]))] if count else [name]:
                    scope.names.add(n)
                    kernel.registers[scope.resolve(n)] = match[1]
        elif statement.startswith(".branchtargets"):
            kernel.tables[table] = [t.strip() for t in statement[len(".branchtargets") :].split(",")]
        elif statement.startswith("."):
            variable = _declare(statement)
            if variable is None:
                raise PtxError(f"line {line}: not implemented: {statement[:80]}")
            kernel.variables.append(variable)
        elif statement:
            kernel.instructions.append(_instruction(statement, scope, kernel, line, source))
    return _resolve_labels(module)


def _instruction(statement: str, scope: _Scope, kernel: Kernel, line: int, source) -> Instruction:
    guard = None
    if statement.startswith("@"):
        match = _GUARD.match(statement)
        guard, statement = Register(scope.resolve(match[2]), bool(match[1])), match[3]
    parts = statement.split(None, 1)
    operands = []
    for text in _split(parts[1]) if len(parts) > 1 else []:
        operand = _operand(text, scope, kernel)
        if isinstance(operand, Symbol):  # labels may come later: remember the scope's spelling
            operand = _Unresolved(operand, scope)
        operands.append(operand)
    return Instruction(parts[0], operands, guard, line, source)


@dataclass
class _Unresolved:
    symbol: Symbol
    scope: _Scope


def _resolve_labels(module: Module) -> Module:
    for kernel in module.kernels.values():
        for instruction in kernel.instructions:
            instruction.operands = [
                Symbol(o.scope.resolve(o.symbol.name), o.symbol.offset) if isinstance(o, _Unresolved) else o
                for o in instruction.operands
            ]
    return module
