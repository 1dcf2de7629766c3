"""Where tensors lie: noticed when one moves, and what shares memory with them."""

import torch

from cute_kernels.hyena.addresses import Addresses


def test_hold_until_one_moves():
    tensors = [torch.zeros(8) for _ in range(3)]
    known = Addresses(tensors)
    assert known.hold()
    tensors[1].add_(1)
    assert known.hold()
    tensors[1].untyped_storage().resize_(1 << 22)
    assert not known.hold()
    assert Addresses(tensors).hold()


def test_apart():
    memory = torch.zeros(100)
    base = memory.data_ptr()
    known = Addresses([memory[10:20], memory[15:30], memory[50:60], memory[60:70], memory[80:90:3]])
    free = [n not in range(10, 30) and n not in range(50, 70) and n not in range(80, 90) for n in range(100)]
    for first in range(100):
        for last in range(first + 1, 101):
            assert known.apart(base + 4 * first, base + 4 * last) == all(free[first:last]), (first, last)
