"""P46: weight decay reaches the parameters that it should, and no others."""

from __future__ import annotations

import torch

from samestep.optim import factory
from samestep.recipe.schema import Optimizer

LR, DECAY, STEPS = 0.1, 0.1, 3


def test_p46_with_zero_gradients_norms_and_biases_do_not_move_and_matrices_decay() -> None:
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight", "norm.weight", "a.bias")
    named = {name: torch.ones(3, requires_grad=True) for name in names}
    optimizer = factory(Optimizer(lr=LR, weight_decay=DECAY))(named)
    for _ in range(STEPS):
        for tensor in named.values():
            tensor.grad = torch.zeros(3)
        optimizer.step()
    matrix, *others = named.values()
    # AdamW multiplies by 1 - lr x decay at each step, whatever the gradient is.
    torch.testing.assert_close(matrix.detach(), torch.full((3,), (1 - LR * DECAY) ** STEPS))
    assert all(torch.equal(tensor, torch.ones(3)) for tensor in others)
