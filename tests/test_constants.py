"""Small constant tensors are memoised where that is safe."""

import torch
from torch._subclasses import FakeTensorMode

from regard.constants import accumulating_dtype, constant, device_vector

CPU = torch.device("cpu")


def test_a_constant_is_made_once_for_each_of_its_arguments():
    made = []

    @constant
    def ones(size):
        made.append(size)
        return torch.ones(size)

    assert ones(3) is ones(3)
    assert ones(2) is not ones(3)
    assert made == [3, 2]


def test_a_constant_made_in_inference_mode_can_be_used_with_autograd():
    with torch.inference_mode():
        vector = device_vector((0.25, 0.75), torch.float64, CPU)
    assert not vector.is_inference()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (x * vector).sum().backward()
    assert x.grad.tolist() == [0.25, 0.75]


def test_fake_tensors_are_not_memoised():
    values = (3.0, 5.0, 7.0)
    with FakeTensorMode():
        fake = device_vector(values, torch.float32, CPU)
    real = device_vector(values, torch.float32, CPU)
    assert type(fake) is not torch.Tensor
    assert type(real) is torch.Tensor
    assert real.tolist() == [3.0, 5.0, 7.0]


def test_torch_func_transforms_do_not_memoise():
    @constant
    def three():
        return torch.tensor(3.0)

    torch.func.grad(lambda x: x * three())(torch.tensor(1.0))
    assert torch.func.vmap(lambda x: x * three())(torch.ones(2)).tolist() == [3.0, 3.0]
    assert three() is three()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(three())


def test_sums_are_in_float32_or_in_float64_for_float64():
    assert accumulating_dtype(torch.bfloat16) == torch.float32
    assert accumulating_dtype(torch.float16, torch.float32) == torch.float32
    assert accumulating_dtype(torch.bfloat16, torch.float64) == torch.float64
