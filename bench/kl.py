"""The KL term against the truth, on a model so small that all its answers can be listed.

    .venv/bin/python bench/kl.py

It prints a row for each reference model. The KL divergence from it is in nats. The other columns
are means over all answers, weighted by their probability: the metric `kl` over that KL, and the
cosine between KL's own gradient and that of `policy_loss`, for both `training.kl_in`."""

import itertools
import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
from machinery.passes import store_in_answers

VOCABULARY, STOP = 6, 0


def small_model(spread: float) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=STOP))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    return model.double()


def moved(model: torch.nn.Module, distance: float) -> torch.nn.Module:
    """Returns another model. It is farther away the larger the distance."""
    other = small_model(1.0)
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for own, parameter in zip(model.parameters(), other.parameters(), strict=True):
            noise = torch.randn(own.shape, generator=stream, dtype=own.dtype)
            parameter.copy_(own + distance * noise * own.std().nan_to_num(0))
    return other


def all_answers(L: int) -> list[main.Trajectory]:
    """Returns every answer that ends with the stop token, or is truncated after L tokens."""
    others = [token for token in range(VOCABULARY) if token != STOP]
    completions = []
    for length in range(L):
        completions += [[*start, STOP] for start in itertools.product(others, repeat=length)]
    completions += [list(start) for start in itertools.product(others, repeat=L)]
    question = main.Question({}, [3, 1, 4])
    return [main.Trajectory(question, completion, "", False) for completion in completions]


def gradient_of(value: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def measured(L: int, distance: float) -> dict[str, float]:
    model = small_model(0.4)
    answers = all_answers(L)
    config = main.load_config(["training.kl_beta=1", f"training.max_new_gen_tokens={L}"])
    log_probs, _ = main.Policy(model, config)(answers)
    with torch.no_grad():
        reference, _ = main.Policy(moved(model, distance), config)(answers)
    store_in_answers(answers, reference_log_probs=reference)

    lengths = [answer.num_tokens for answer in answers]
    log_probs_of_each = log_probs.split(lengths)
    log_p = torch.stack([of_answer.sum() for of_answer in log_probs_of_each])  # (answers,)
    log_p_ref = torch.stack([of_answer.sum() for of_answer in reference.split(lengths)])
    p = log_p.exp()
    exact = (p * (log_p - log_p_ref)).sum()
    truth = gradient_of(exact, model)
    found = {"L": L, "probability": p.sum().item(), "kl": exact.item()}
    for kl_in in ("reward", "loss"):
        training = config.training.model_copy(update={"kl_in": kl_in})
        loss, kl = means_over_answers(p.detach(), log_probs_of_each, answers, training)
        gradient = gradient_of(loss * L, model)
        found["estimate / kl"] = (kl / exact).item()
        found[f"cosine {kl_in}"] = torch.cosine_similarity(gradient, truth, dim=0).item()
        found[f"length {kl_in}"] = (gradient.norm() / truth.norm()).item()
    return found


def means_over_answers(
    p: torch.Tensor, log_probs_of_each: tuple, answers: list, training
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean loss and the mean metric `kl` of single answers, weighted by `p`."""
    mean_loss = 0.0
    mean_kl = 0.0
    for weight, log_probs, answer in zip(p, log_probs_of_each, answers, strict=True):
        totals = {"answers": 1, "tokens": answer.num_tokens}
        loss, watched = main.policy_loss(log_probs, [answer], totals, training)
        mean_loss += weight * loss
        mean_kl += weight * watched["kl"]
    return mean_loss, mean_kl


if __name__ == "__main__":
    rows = [measured(L, distance) for L in (1, 4) for distance in (0.1, 0.3, 1.0)]
    print("| answers of | KL | `kl` over KL | cosine, `reward` | cosine, `loss` |\n"
          "| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {'one token' if row['L'] == 1 else 'up to four'} | {row['kl']:.3f} "
              f"| {row['estimate / kl']:.6f} | {row['cosine reward']:.6f} "
              f"| {row['cosine loss']:.6f} |")
    print(json.dumps(rows))
