"""A block's weights as the launches take them: converted once, and again where their memory has moved."""

from cute_kernels.hyena.stages import Arguments
from tests.stand_in import StandIn

from .helpers import make


class Counting(StandIn):
    def __init__(self):
        super().__init__()
        self.held_tensors = []

    def held(self, tensor):
        self.held_tensors.append(tensor)
        return (len(self.held_tensors), tensor.data_ptr())


def arguments() -> Arguments:
    return Arguments({name: t.clone() for name, t in make()[1].weights().items()})


def test_converted_once():
    w, current = arguments(), Counting()
    first = w.held(current)
    count = len(current.held_tensors)
    assert w.held(current) is first
    assert len(current.held_tensors) == count
    assert [len(first[0]), len(first[2])] == [len((*w.filter, *w.matrices)), len(w.finish)]


def test_converted_again_for_another_backend():
    w = arguments()
    one, other = Counting(), Counting()
    w.held(one)
    w.held(other)
    assert len(one.held_tensors) == len(other.held_tensors) > 0


def test_converted_again_where_memory_moved():
    w, current = arguments(), Counting()
    before = w.held(current)[1]
    w.skip.untyped_storage().resize_(1 << 20)  # more than fits beside its neighbours
    assert w.skip.data_ptr() != before[1]
    assert w.held(current)[1][1] == w.skip.data_ptr()
