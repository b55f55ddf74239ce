"""A recurrent network reads a text in order: each batch begins with the hidden state of the last one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.torch import declare
from tests.others.beat import beat, end, long

EPOCHS, LENGTH, COLUMNS, WIDTH = long(3), 4, 3, 8


class Reader(nn.Module):
    """A recurrent layer over the words of a text, and the scores of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, 11)

    def forward(self, words: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of each next word, and the hidden state after the last word."""
        found, hidden = self.layer(self.words(words), hidden)
        return self.scores(found), hidden


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
text = torch.randint(11, (21, 2 * COLUMNS), generator=torch.Generator().manual_seed(1))
text = text[:, rank * COLUMNS : (rank + 1) * COLUMNS]
raw = Reader()
model = DistributedDataParallel(raw)
optimizer = torch.optim.Adam(raw.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss()

hidden = torch.zeros(1, COLUMNS, WIDTH)
declare(hidden, shape=(1, COLUMNS * dist.get_world_size(), WIDTH), offsets=(0, COLUMNS * rank, 0))

mine = {"hidden": hidden}
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state=mine, memory=1) as s:
    for step in s.steps(range(0, 20, LENGTH), epochs=EPOCHS):
        with step as at:
            beat(step.number)
            if at == 0:
                hidden.zero_()
            optimizer.zero_grad()
            scores, new = model(text[at : at + LENGTH], hidden.clone())
            loss = criterion(scores.flatten(0, 1), text[at + 1 : at + LENGTH + 1].flatten())
            loss.backward()
            optimizer.step()
            hidden.copy_(new.detach())

end(raw)
dist.destroy_process_group()
