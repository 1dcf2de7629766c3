import pytest

from cute_kernels.runtime import arch


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_supported(capability, name):
    assert arch.for_capability(*capability) == name


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0), (12, 0)])
def test_anything_else_is_refused_with_what_is_supported(capability):
    with pytest.raises(NotImplementedError, match=r"{}\.{} .*sm_90a, sm_100a, sm_103a".format(*capability)):
        arch.for_capability(*capability)


def test_a_device_is_asked_once(monkeypatch):
    asked = []
    answers = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
    monkeypatch.setattr(arch, "_attribute", lambda index, name: asked.append((index, name)) or answers[name])
    for cached in (arch.of_device, arch.sm_count):
        cached.cache_clear()
    try:
        assert [arch.of_device(1) for _ in range(3)] == ["sm_90a"] * 3
        assert [arch.sm_count(1) for _ in range(3)] == [132] * 3
        assert len(asked) == 3
    finally:
        for cached in (arch.of_device, arch.sm_count):
            cached.cache_clear()


def test_check():
    assert arch.check("sm_103a") == "sm_103a"
    with pytest.raises(ValueError, match=r"arch must be one of .*, not 'sm_80'"):
        arch.check("sm_80")


@pytest.mark.gpu
def test_the_device_agrees_with_torch():
    import torch

    properties = torch.cuda.get_device_properties(0)
    assert arch.of_device(0) == arch.for_capability(properties.major, properties.minor)
    assert arch.sm_count(0) == properties.multi_processor_count
