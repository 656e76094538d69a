"""How prompts and answers are put together: micro-batches, padding, prompts read once for all."""

from types import SimpleNamespace

import torch
from transformers.cache_utils import DynamicLayer

NOTHING = SimpleNamespace(prompt_ids=[0], completion_ids=[0])  # an answer, as small as they come
ROOM = 16  # tokens that a layer of keys and values has place for behind what it holds


def make_micro_batches(answers: list, budget: int) -> list[list]:
    """As many rows together as the budget of padded tokens allows; the longest completions first,
    those of similar length side by side."""
    batches: list[list] = [[]]
    for answer in sorted(answers, key=lambda answer: len(answer.completion_ids), reverse=True):
        longest = max(len(row.prompt_ids + row.completion_ids) for row in [*batches[-1], answer])
        if batches[-1] and (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
        batches[-1].append(answer)
    return batches if answers else []


def hand_to_answers(batch: list, **values: torch.Tensor) -> None:
    """Gives each answer its own part of (tokens,), under the name that it is passed by."""
    lengths = [len(answer.completion_ids) for answer in batch]
    for name, tokens in values.items():
        for answer, own in zip(batch, tokens.detach().split(lengths), strict=True):
            setattr(answer, name, own)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it is padded. `generate` does the same."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_prompts(prompts: list[list[int]], device: torch.device):
    """Each different prompt once, padded on the left: ids and mask, (different, time), and which
    each prompt is, (prompts,)."""
    different = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    longest = max(2, *map(len, different))  # one token to read ahead, and one to start from
    ids = [[0] * (longest - len(prompt)) + [*prompt] for prompt in different]
    mask = [[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in different]
    which = [different[tuple(prompt)] for prompt in prompts]
    return tuple(torch.tensor(each, device=device) for each in (ids, mask, which))


def read_prefix(model, ids: torch.Tensor, mask: torch.Tensor):
    """Keys and values of every prompt token but the last, with which whoever goes on starts."""
    mask = mask[:, :-1]
    output = model.base_model(input_ids=ids[:, :-1], attention_mask=mask,
                              position_ids=positions(mask), use_cache=True)
    return output.past_key_values


def read_prompts(model, prompts: list[list[int]]):
    """What `generate` goes on from: ids and mask, (prompts, time), and keys and values of all but
    the last token. Equal prompts are read once."""
    ids, mask, which = pad_prompts(prompts, model.device)
    cache = read_prefix(model, ids, mask)
    # Layers with a sliding window stay the library's own.
    cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer
                    for layer in cache.layers]
    cache.batch_select_indices(which)
    return ids[which], mask[which], cache


class RoomyLayer(DynamicLayer):
    """Keys and values of a layer, (rows, heads, time, width), with room behind them: the library's
    own copies all it holds to append a token, which takes longer than attending."""

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.keys, self.values, self.is_initialized = layer.keys, layer.values, True
        self.roomy = [layer.keys, layer.values]

    def batch_select_indices(self, indices, room: int = ROOM) -> None:
        """Keeps these rows, and makes room behind them."""
        self.roomy = []
        for held in (self.keys[indices], self.values[indices]):
            rows, heads, time, width = held.shape
            self.roomy.append(held.new_empty(rows, heads, time + room, width))
            self.roomy[-1][:, :, :time] = held
        self.keys, self.values = (roomy[:, :, :time] for roomy in self.roomy)

    def update(self, keys, values, *args, **kwargs):
        time = self.keys.shape[2]
        new_time = time + keys.shape[2]
        if new_time > self.roomy[0].shape[2]:
            self.batch_select_indices(slice(None), max(ROOM, new_time - time))
        for roomy, new in zip(self.roomy, (keys, values)):
            roomy[:, :, time:new_time] = new
        self.keys, self.values = (roomy[:, :, :new_time] for roomy in self.roomy)
        return self.keys, self.values
