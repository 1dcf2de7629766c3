"""Products that ptxas fuses with the sum they go into: PTX lets it where neither has a rounding modifier.

Seen in machine code, and on an H200: a product is fused where all its uses are additions or subtractions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class Encoded:
    """What of an encoded instruction matters here."""

    opcode: str
    guarded: bool
    written: list[int]  # numbers of registers
    read: list[int]


def _is(instruction: Encoded, *names: str) -> bool:
    """Whether it is one of these on fp32, without a rounding modifier and a guard."""
    words = instruction.opcode.split(".")
    return words[0] in names and words[1:] in (["f32"], ["ftz", "f32"]) and not instruction.guarded


def fused(instructions: Sequence[Encoded | None], labels: set[int]) -> Iterator[tuple[int, int]]:
    """(product, sum) by their indices; None is an instruction that the machine refuses."""
    writers: Counter[int] = Counter()
    users: defaultdict[int, list[int]] = defaultdict(list)
    for i, instruction in enumerate(instructions):
        if instruction:
            writers.update(instruction.written)
            for register in instruction.read:
                users[register].append(i)
    taken: set[int] = set()
    for i, product in enumerate(instructions):
        if not product or not _is(product, "mul"):
            continue
        (result,) = product.written
        uses = users[result]
        alone = uses and writers[result] == 1 and len(set(uses)) == len(uses) and not taken.intersection(uses)
        if alone and all(_fits(instructions, labels, i, u) for u in uses):
            taken.update(uses)
            yield from ((i, u) for u in uses)


def _fits(instructions: Sequence[Encoded | None], labels: set[int], product: int, use: int) -> bool:
    """The use is a sum of the same kind in the same block, and reads what the product read."""
    a, b = instructions[product], instructions[use]
    if use < product or not _is(b, "add", "sub") or ("ftz" in a.opcode) != ("ftz" in b.opcode):
        return False
    if labels.intersection(range(product + 1, use + 1)):
        return False
    between = [x for x in instructions[product + 1 : use] if x]
    return not any(register in x.written for x in between for register in a.read)
