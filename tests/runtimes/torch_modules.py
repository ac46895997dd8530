"""Modules that are scripted for tests. TorchScript reads their source from this file; import it only with torch."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple  # noqa: UP035 - what TorchScript reads

import torch
from torch import Tensor


class Picky(torch.nn.Module):
    """Answers what it got; fails inside its graph where a value is below zero."""

    def forward(self, x: Tensor) -> Tensor:
        wanted = 4 if bool((x < 0).any()) else 3
        return x.reshape([x.size(0), wanted]) + 0.0


class Same(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Greedy(torch.nn.Module):
    """Makes as many zeros as it is told."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros([int(x.sum().item())])


class Raises(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 5).any()):
            raise ValueError("a value is above five")
        return x * 2


class Writes(torch.nn.Module):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x


class WritesThroughAView(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for row in range(x.size(0)):
            x[row].mul_(2)
        return x + 0


class Counts(torch.nn.Module):
    """Keeps state by setting an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.seen


class Remembers(torch.nn.Module):
    """Keeps state by writing into a buffer, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.last[0] = x[0]
        return x + self.last[0]


class RemembersInALoop(torch.nn.Module):
    """Keeps state where the graph alone does not show it: the buffer goes through a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        held = self.total
        for row in range(x.size(0)):
            if row % 2 == 0:
                held = held.add_(x[row])
        return x + held


class TwoIn(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


class Optionally(torch.nn.Module):
    def forward(self, a: Tensor, b: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        return a if b is None else a - b


class Pair(torch.nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        return x.sum(1), x.argmax(1)


class Named(torch.nn.Module):
    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        return {"total": x.sum(1), "best": x.argmax(1)}


class Listed(torch.nn.Module):
    def forward(self, x: Tensor) -> List[Tensor]:  # noqa: UP006
        return [x, x * 2]


class Counted(torch.nn.Module):
    """Takes what is no tensor."""

    def forward(self, x: Tensor, times: int) -> Tensor:
        return x * times


class Text(torch.nn.Module):
    """Returns what is no tensor."""

    def forward(self, x: Tensor) -> str:
        return "text"


class Complex(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


class Mixes(torch.nn.Module):
    """Twice the rows do not give twice the answers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


class Turned(torch.nn.Module):
    """Answers a view that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()
