"""New tensors of known kinds: what they are, whatever made them."""

import pytest
import torch

from cute_kernels.runtime import fresh

KINDS = [((2, 3, 4), torch.float32), ((5,), torch.bfloat16), ((), torch.float16), ((2, 0, 3), torch.float32)]
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]


def like(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_made_like_by_torch_empty(device):
    wanted = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in KINDS]
    for _ in range(2):
        assert [*map(like, fresh.maker(wanted[0].device, KINDS)())] == [*map(like, wanted)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_tensor_has_memory_of_its_own(device):
    make = fresh.maker(torch.empty(1, device=device).device, [((64,), torch.float32)] * 2)
    made = make() + make()
    storages = {t.untyped_storage()._cdata for t in made}
    assert len(storages) == len(made)
    assert all(t.untyped_storage().nbytes() == t.nbytes and not t.requires_grad for t in made)


def test_past_the_dispatcher(monkeypatch):
    """As on a GPU, with the allocation of a CPU in its place: on the device alone that is the current one."""
    calls = []

    def empty_strided(shape, strides, dtype):
        calls.append(shape)
        return torch._C._dynamo.guards._empty_strided_cpu(shape, strides, dtype)

    monkeypatch.setattr(fresh, "empty_strided", empty_strided)
    monkeypatch.setattr(fresh, "_current_device", lambda: 1)
    monkeypatch.setattr(torch, "empty", lambda *args, device, **kwargs: torch.zeros(*args, **kwargs))
    for index, used in ((1, True), (0, False)):
        calls.clear()
        made = fresh.maker(torch.device("cuda", index), KINDS)()
        assert calls == [shape for shape, _ in KINDS] * used
        wanted = [torch.zeros(shape, dtype=dtype) for shape, dtype in KINDS]
        assert [*map(like, made)] == [*map(like, wanted)]


@pytest.mark.gpu
def test_inference_mode():
    make = fresh.maker(torch.empty(1, device="cuda").device, [((3,), torch.float32)])
    with torch.inference_mode():
        assert make()[0].is_inference()
    assert not make()[0].is_inference()
