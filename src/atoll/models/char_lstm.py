"""A character-level LSTM."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.models.sizes import Classes, Depth, Width


class CharLSTM(nn.Module):
    """An embedding, a stacked LSTM, and an output at every position: (B, T) tokens -> (B, T, K) scores."""

    def __init__(self, num_classes: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next character at every position."""
        states, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.output(states)
        return scores


def char_lstm(num_classes: Classes, embedding: Width = 8, hidden: Width = 256, layers: Depth = 2) -> nn.Module:
    """Build two LSTM layers of 256 units on 8-dimensional embeddings (McMahan et al. 2017, section 3)."""
    return CharLSTM(num_classes, embedding, hidden, layers)
