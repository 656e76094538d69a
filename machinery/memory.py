"""What fits into the memory that is free, found out before the first step.

Without this a CPU's system would end a rank without a word, in the middle of a step."""

import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from machinery.batches import MOST_TOKENS
from machinery.errors import UserError
from machinery.policy import LOGITS_PER_CHUNK
from machinery.prompts import prefill
from machinery.ranks import DEVICE, max_over_ranks
from machinery.text import wrap

# How much memory learning may take for each byte that its tensors hold. An allocator leaves holes
# between them. On a CPU it took 1.4 to 1.7 bytes with SmolLM2-135M. For a GPU this is a guess.
TAKEN = 2.0 if DEVICE.type == "cpu" else 1.4
MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container
SHORT, LONG = 32, 96  # tokens of the two answers that are measured


# ---------------------------------------------------------------- what is free

def free_memory() -> float:
    """Returns the bytes that each rank can still take. Collective."""
    dist.barrier()  # All ranks have taken what they need until here.
    if DEVICE.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        free = free_ram() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -max_over_ranks({"free": -free})["free"]  # that of the rank that has least


def free_ram() -> int:
    """Returns the bytes that the system can give to new tensors."""
    if not MEMINFO.exists():  # macOS has no such file. Half of its RAM may be free.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = CONTROL_GROUP / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":  # a container with less
        used = int((CONTROL_GROUP / "memory.current").read_text())
        for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # The system gives this back when it is needed.
        free = min(free, int(limit.read_text()) - used)
    return free


# ---------------------------------------------------------------- what is needed

class LiveBytes(TorchDispatchMode):
    """Counts at each operation how many bytes all tensors hold that were made since it began, but
    not these weights. It cannot see what a single operation needs inside."""

    supports_higher_order_operators = True  # like FlexAttention

    def __init__(self, weights: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.seen = {weight.untyped_storage()._cdata for weight in weights}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        size = storage.nbytes()
        if address not in self.seen:  # Several tensors may share it.
            self.seen.add(address)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, address, size)

    def gone(self, address: int, size: int) -> None:
        self.seen.remove(address)
        self.now -= size


def learning_bytes(run: Any) -> tuple[float, float]:
    """Returns the bytes that a token of a micro-batch holds from the forward to the backward pass,
    and those that learning takes however many tokens there are."""
    held = {}
    run.policy.train()
    for num_tokens in (SHORT, LONG):
        ids = [token % 8 for token in range(num_tokens)]  # Any model knows these.
        answer = SimpleNamespace(
            prompt_ids=ids[:num_tokens // 2], completion_ids=ids[num_tokens // 2:])
        with LiveBytes() as live, run.policy.no_sync():  # Weights cancel out below.
            results = run.policy([answer])  # They hold on to the tensors of the pass.
            held[num_tokens] = live.now
        del results
    of_a_token = (held[LONG] - held[SHORT]) / (LONG - SHORT)
    # The logits of a chunk, over the temperature, their log softmax, and its gradient, in float32.
    vocabulary = run.model.config.get_text_config().vocab_size
    fixed = 4 * 4 * min(LOGITS_PER_CHUNK, MOST_TOKENS * vocabulary)
    if run.config.model.precision == "mixed":
        fixed += bytes_that_learn(run.model) / 2  # Autocast has a copy in half precision.
    head = run.model.get_output_embeddings().weight
    if head.requires_grad:
        fixed += 2 * head.numel() * head.element_size()  # of a chunk, and the sum of chunks
    return of_a_token, fixed


def sampling_bytes(run: Any, num_tokens: int) -> float:
    """Returns what an answer needs while it is sampled, if prompt and answer have so many tokens
    together: its KV cache and its logits."""
    held = {}
    run.sampler.eval()
    weights = list(run.sampler.parameters())
    for length in (SHORT, LONG):
        ids = torch.arange(length, device=DEVICE)[None] % 8
        with LiveBytes(weights) as live, torch.no_grad():
            cache = prefill(run.sampler, ids, torch.ones_like(ids, dtype=torch.bool))
            held[length] = live.now
        del cache
    of_a_token = (held[LONG] - held[SHORT]) / (LONG - SHORT)
    # `prefill` leaves out the last token. Layers like Mamba's hold a state of constant size.
    running_state = held[SHORT] - (SHORT - 1) * of_a_token
    # In float32: the logits, over the temperature, their softmax, and one more while it is made.
    logits = 4 * 4 * run.model.config.get_text_config().vocab_size
    return of_a_token * num_tokens + running_state + logits


def bytes_that_learn(model: nn.Module) -> int:
    """Returns the bytes of this rank's weights that are trained."""
    learning = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    parts = [own.to_local() if isinstance(own, DTensor) else own for own in learning]
    return sum(part.numel() * part.element_size() for part in parts)


# ---------------------------------------------------------------- what fits

def check_optimizer_fits(model: nn.Module) -> None:
    """Refuses a model whose gradients and optimizer state do not fit into the computer's RAM. A GPU
    says so by itself. Collective."""
    free = free_memory()
    # The gradient, and two numbers of AdamW for each weight. None of them is in memory yet.
    needed = 3 * bytes_that_learn(model)
    if DEVICE.type == "cpu" and needed > free:
        raise UserError(
            f"learning needs {needed / 1e9:.1f} GB for each rank, and {free / 1e9:.1f} GB are "
            "free: start fewer ranks, set model.lora_rank to 16, for example, or take a smaller "
            "model")


def fit_into_memory(run: Any) -> None:
    """Chooses training.tokens_per_micro_batch if it is left open, and says what may not fit.

    The gradient does not depend on the choice, but its last bits do. So a resumed run keeps what it
    had. Collective."""
    free = free_memory()
    longest = max(run.training_questions.rows, key=lambda row: len(row["prompt"]))
    longest_length = len(run.training_questions.encode(longest))
    longest_length += run.config.training.max_new_gen_tokens
    of_a_token, fixed = learning_bytes(run)
    if run.config.training.tokens_per_micro_batch is None:
        run.folder.notes.append(wrap(choose_tokens(run, free, of_a_token, fixed)))
    tokens = max(longest_length, run.config.training.tokens_per_micro_batch)
    needed = TAKEN * (fixed + of_a_token * tokens)
    if needed > free:
        run.folder.notes.append(wrap(
            f"! learning may need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free for each "
            "rank: lower training.tokens_per_micro_batch or training.max_new_gen_tokens, set "
            "model.gradient_checkpointing to true, or start fewer ranks"))
    for note in sampling_notes(run, free, longest_length):
        run.folder.notes.append(wrap(note))


def choose_tokens(run: Any, free: float, of_a_token: float, fixed: float) -> str:
    """Sets training.tokens_per_micro_batch. Returns the line that says so."""
    tokens = tokens_that_fit(free / TAKEN - fixed, of_a_token)
    reason = f", as each rank has {free / 1e9:.1f} GB" if tokens < MOST_TOKENS else ""
    if run.folder.checkpoint is not None:
        tokens = run.folder.checkpoint.state.get("tokens_per_micro_batch", tokens)
        reason = ", as before"
    training = run.config.training.model_copy(update={"tokens_per_micro_batch": tokens})
    run.config = run.config.model_copy(update={"training": training})
    return f"learning takes {tokens:,} tokens at a time{reason} (training.tokens_per_micro_batch)"


def tokens_that_fit(free: float, of_a_token: float) -> int:
    """Returns a power of two, which small changes of the free memory seldom change."""
    tokens = MOST_TOKENS
    while tokens > 1 and tokens * of_a_token > free:
        tokens //= 2
    return tokens


def sampling_notes(run: Any, free: float, num_tokens: int) -> list[str]:
    """Says so if the answers that are sampled together may not fit, at their full length."""
    config = run.config
    num_trained = config.training.num_samples_per_step * config.training.group_size
    num_evaluated = len(run.validation_questions) * config.validation.best_of_n
    num_evaluated //= dist.get_world_size()
    rows = min(config.sampling.max_rows, max(num_trained, num_evaluated))
    of_a_row = sampling_bytes(run, num_tokens)
    if rows * of_a_row <= free:
        return []
    fitting = max(1, int(free / TAKEN / of_a_row))
    note = (
        f"! {rows} answers of up to {num_tokens:,} tokens may need {rows * of_a_row / 1e9:.1f} GB "
        f"while they are sampled, and {free / 1e9:.1f} GB are free for each rank: lower "
        f"sampling.max_rows to {fitting}")
    return [note]
