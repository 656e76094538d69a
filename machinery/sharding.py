"""Weights, gradients and optimizer state, sharded over the ranks by `fully_shard`."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from machinery.errors import as_user_error
from machinery.passes import MadeUpAnswer
from machinery.ranks import DEVICE, RANK, WORLD_SIZE

# Newer versions of torch call it `all_gather_single`.
gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sharded(nn.Module):
    """Replaces DistributedDataParallel. Each rank keeps a part of every weight that learns.

    The ranks gather the weights of a layer just before they compute it, and then free them. (In
    `mixed`, autograd keeps copies in bfloat16 until the backward pass, unless
    model.gradient_checkpointing is set.)
    Gradients are shared after each micro-batch, because keeping them in full would take the memory
    that sharding saves."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        learning = {parameter for parameter in policy.parameters() if parameter.requires_grad}
        frozen = set(policy.parameters()) - learning
        with as_user_error("training.shard: this model cannot be sharded"):
            self.module = shard(policy, learning, frozen)
        for parameter in frozen:
            parameter.data = parameter.data.to(DEVICE)
        torch.set_autocast_cache_enabled(False)  # It would hold all weights in bfloat16.

    def forward(self, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
        # Whatever a sharded module is given is searched for tensors, so it only gets what it reads.
        inputs = [MadeUpAnswer(answer.prompt_ids, answer.completion_ids) for answer in answers]
        return self.module(inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Does nothing: gradients are shared after each micro-batch."""
        return nullcontext()


def shard(
    policy: nn.Module, learning: set[nn.Parameter], frozen: set[nn.Parameter]
) -> nn.Module:
    """Leaves this rank its part of each parameter that learns. Collective."""
    layers = [part for part in policy.modules() if isinstance(part, GradientCheckpointingLayer)]
    mesh = init_device_mesh(DEVICE.type, (WORLD_SIZE,))
    for layer in reversed(layers):  # A layer inside another one comes first.
        fully_shard(layer, mesh=mesh, ignored_params=frozen)
    embeddings = policy.model.get_input_embeddings()
    output_layer = policy.model.get_output_embeddings()
    if embeddings.weight in learning and embeddings.weight is not output_layer.weight:
        fully_shard(embeddings, mesh=mesh, ignored_params=frozen)
        embeddings.set_unshard_in_backward(False)  # Their gradient doesn't depend on the weights.
    # Without resharding, a forward pass with no backward pass would leave gathered weights behind,
    # which the next update would make stale.
    return fully_shard(policy, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)


def unsharded(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns the full tensor. A sharded one is first converted to `dtype`, if given, and then
    gathered, which is collective.

    DTensor's own `full_tensor` can make a run on CPUs stand still, or crash (seen with torch 2.13).
    Two threads of gloo write the name of the last collective into one string, without a lock. A
    name of more than 15 characters, as `full_tensor`'s collective has, is in memory of its own,
    which both threads may free."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not tensor.placements[0].is_shard():  # the gradient's norm, which isn't gathered
        return tensor.full_tensor()
    own = tensor.detach().to_local().to(dtype)
    num_rows = math.ceil(len(tensor) / WORLD_SIZE)  # per rank; the last ranks may have fewer
    missing = num_rows - len(own)
    if missing:
        own = torch.cat([own, own.new_zeros(missing, *own.shape[1:])])
    full = own.new_empty(WORLD_SIZE * num_rows, *own.shape[1:])
    gather_rows(full, own)
    return full[:len(tensor)]


def fill(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    """Sets a tensor, sharded or not, to the values that rank 0 passes. Collective."""
    full = unsharded(tensor)
    if RANK == 0:
        full.copy_(values)
    dist.broadcast(full, 0)
    if isinstance(tensor, DTensor):
        # With `src_data_rank=None` each rank takes its own part, and nothing is sent again.
        tensor.copy_(distribute_tensor(
            full, tensor.device_mesh, tensor.placements, src_data_rank=None))


def gathered(
    tensors: dict[str, torch.Tensor], max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields full tensors on rank 0's CPU, in parts of at most `max_bytes` or of one tensor. On
    other ranks there are no parts, but all ranks have to iterate. Collective."""
    part = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        full = unsharded(tensor)
        if RANK != 0:
            continue
        if part and num_bytes + full.nbytes > max_bytes:
            yield part
            part.clear()  # With a new dictionary, the caller would still hold this one's tensors.
            num_bytes = 0
        part[name] = full.cpu().contiguous()
        num_bytes += full.nbytes
    if part:
        yield part
