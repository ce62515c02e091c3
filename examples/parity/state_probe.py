"""A gated recurrent state over a packed row of two documents: does the state start again at the second?

python examples/parity/state_probe.py [--right]
"""

import sys

import torch
from torch import Tensor, nn

from meshwright import parity


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        decay = torch.sigmoid(self.gate(x))
        if "--right" in sys.argv:
            decay = decay * (position_ids > 0)[..., None]
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + x[:, t]
            states.append(state)
        return torch.stack(states, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixer, self.head = nn.Embedding(32, 8), Scan(), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.mixer(self.tokens(input_ids), position_ids))


torch.manual_seed(0)
positions = torch.cat([torch.arange(9), torch.arange(6)])[None]
parity.state_probe(Model(), {"input_ids": torch.randint(0, 32, (1, 15)), "position_ids": positions})
