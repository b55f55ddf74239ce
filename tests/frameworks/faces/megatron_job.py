"""Megatron-core's GPT on CPU: two tensor-parallel ranks times two replicas, or an optimizer sharded over four replicas.

``megatron_job.py --mode tensor``: weights split by Megatron, each rank with AdamW for its part, gradients averaged over
the replicas.
``megatron_job.py --mode zero``: ZeRO-1 with copies. Each rank updates half of one flat vector of all weights, and two
ranks hold each half. The whole is gathered at the start of the next step, as with Megatron's ``overlap_param_gather``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import holdfast
from holdfast.integrations.megatron import declare
from holdfast.torch import declare as declare_region

CONTEXT = 16
VOCABULARY = 64


class CpuAttention(nn.Module):
    """An attention in place of Megatron's, which needs a CUDA device. Tensors: (sequence, batch, heads, width)."""

    def __init__(self, config: Any, **arguments: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **more: Any) -> Tensor:
        """Compute causal attention. Returns a tensor of shape (sequence, batch, heads x width)."""
        heads = [t.permute(1, 2, 0, 3) for t in (query, key, value)]
        out = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def build(tensor_parallel: int) -> nn.Module:
    """Build a GPT of two layers."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.1, attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = CpuAttention
    torch.manual_seed(0)
    made: nn.Module = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=CONTEXT)
    return made


class Shard(nn.Module):
    """This rank's half of all weights as one vector, with its process groups."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.whole = list(model.parameters())
        size = sum(p.numel() for p in self.whole)
        self.part = -(-size // 2)
        flat = nn.functional.pad(self._flat([p.data for p in self.whole]), (0, 2 * self.part - size))
        self.index = rank % 2
        self.weights = nn.Parameter(flat[self.index * self.part :][: self.part].clone())
        declare_region(self.weights, [2 * self.part], [self.index * self.part])
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.group = groups[rank // 2]

    @staticmethod
    def _flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors])

    def gather(self) -> None:
        """Gather all weights from the two halves."""
        parts = [torch.empty_like(self.weights.data) for _ in range(2)]
        dist.all_gather(parts, self.weights.data, group=self.group)
        flat, at = torch.cat(parts), 0
        for parameter in self.whole:
            parameter.data.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            parameter.grad = None
            at += parameter.numel()

    def scatter(self) -> None:
        """Average the gradients, and keep this rank's half."""
        flat = self._flat([p.grad for p in self.whole if p.grad is not None])
        flat = nn.functional.pad(flat, (0, 2 * self.part - len(flat)))
        dist.all_reduce(flat)
        self.weights.grad = flat[self.index * self.part :][: self.part] / dist.get_world_size()


def average(model: nn.Module, group: Any) -> None:
    """Average gradients over the replicas of one tensor-parallel rank."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def main() -> None:
    """Train, then write a digest of what this rank holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["tensor", "zero"], required=True)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    tensor_parallel = 2 if given.mode == "tensor" else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    replica, group = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_group()
    model = build(tensor_parallel)
    declare(model)
    shard = Shard(model, dist.get_rank()) if given.mode == "zero" else None
    trained = model if shard is None else shard
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    places = torch.arange(CONTEXT).expand(4, CONTEXT)
    # The search for undeclared state does not know that each step gathers these weights again.
    extras = {} if shard is None else {"gathered": model}
    with holdfast.session(model=trained, optimizer=optimizer, state=extras) as s:
        for step in s.steps(until=given.steps):
            with step:
                # Ranks of one tensor-parallel group draw the same dropout: its seed depends on (step, replica).
                torch.manual_seed(1000 * step.number + replica)
                text = torch.randint(0, VOCABULARY, (4, CONTEXT))
                if shard is not None:
                    shard.gather()
                model(text, places, None, labels=text.roll(-1, 1)).mean().backward()
                if shard is None:
                    average(model, group)
                else:
                    shard.scatter()
                optimizer.step()
                optimizer.zero_grad()
    total = xxhash.xxh3_128()
    for tensor in trained.state_dict().values():
        if isinstance(tensor, Tensor):
            total.update(tensor.numpy().tobytes())
    Path(f"rank-{dist.get_rank()}.json").write_text(json.dumps(total.hexdigest()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
