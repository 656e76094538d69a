"""Weights, gradients and moments that are spread over the ranks, by torch's own `fully_shard`."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from machinery.errors import blame
from machinery.ranks import DEVICE, RANK, WORLD_SIZE


class Sharded(nn.Module):
    """In place of DistributedDataParallel. Leaves each rank its part of each parameter that learns.
    A layer is whole while it runs, and the projection, for all its chunks, while the policy does.
    Gradients meet after each micro-batch: kept whole until the last, they would take the memory
    that is saved."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        learning, frozen = ({each for each in policy.parameters() if each.requires_grad == learns}
                            for learns in (True, False))
        how = {"mesh": init_device_mesh(DEVICE.type, (WORLD_SIZE,)), "ignored_params": frozen}
        layers = [part for part in policy.modules() if isinstance(part, GradientCheckpointingLayer)]
        embeddings, output = (getattr(policy.model, f"get_{kind}_embeddings")()
                              for kind in ("input", "output"))
        with blame("training.shard: this model cannot be cut up"):
            if not layers:
                raise ValueError("it has no layers")
            if len({each.dtype for each in learning}) > 1:
                raise ValueError("it holds several types; model.precision=mixed has but one")
            for layer in reversed(layers):  # those within others first
                fully_shard(layer, **how)
            # Where they learn, and are not the output, too: their gradient takes no weights.
            if embeddings.weight in learning - {output.weight}:
                fully_shard(embeddings, **how).set_unshard_in_backward(False)
            # True: a pass without a backward pass would leave whole weights, soon stale.
            self.module = fully_shard(policy, reshard_after_forward=True, **how)
        for each in frozen:
            each.data = each.data.to(DEVICE)
        policy.model.is_sharded = True  # for `states_before`
        torch.set_autocast_cache_enabled(False)  # which would hold all weights in bfloat16
        self.no_sync = nullcontext

    def forward(self, answers: list):
        # What it is given is searched for tensors, rows and all: it gets what it reads alone.
        return self.module([SimpleNamespace(prompt_ids=answer.prompt_ids,
                                            completion_ids=answer.completion_ids)
                            for answer in answers])


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of a tensor that may be spread over the ranks: collective; in this type, if it is."""
    return tensor.to(dtype).full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(tensor: torch.Tensor, source: int, read: Callable[[], torch.Tensor]) -> None:
    """Gives a tensor, whole or spread, the values that `read` returns on one rank. Collective."""
    values = whole(tensor)
    if RANK == source:
        values.copy_(read())
    dist.broadcast(values, source)
    if values is not tensor:
        tensor.copy_(distribute_tensor(values, tensor.device_mesh, tensor.placements,
                                       src_data_rank=None))


def gathered(tensors: dict[str, torch.Tensor], most: int):
    """The tensors, whole, on the CPU of rank 0, in parts of at most so many bytes. Collective."""
    part = {}
    for name, tensor in tensors.items():
        values = whole(tensor)
        if RANK == 0:
            if part and sum(each.nbytes for each in part.values()) + values.nbytes > most:
                yield part
                part.clear()  # which whoever took it still holds
            part[name] = values.cpu().contiguous()
    if part:
        yield part
