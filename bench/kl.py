"""The KL term against the truth, on a model so small that all its answers can be listed.

    .venv/bin/python bench/kl.py

For answers of one token and of up to four, and references nearer and farther: KL(pi || pi_ref) in
nats; then, as means over all answers, each weighed by its probability, the estimate `kl` over that
KL, and the cosine between its gradient and that of `policy_loss` with either `training.kl_in`."""

import itertools
import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
from machinery.batches import store_in_answers

VOCABULARY, STOP = 6, 0
PROMPT = [3, 1, 4]


def small_model(spread: float):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=STOP))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    return model.double()


def moved(model, distance: float):
    """Another model, farther away the larger the distance."""
    other = small_model(1.0)
    with torch.no_grad():
        stream = torch.Generator().manual_seed(1)
        for own, parameter in zip(model.parameters(), other.parameters(), strict=True):
            noise = torch.randn(own.shape, generator=stream, dtype=own.dtype)
            parameter.copy_(own + distance * noise * own.std().nan_to_num(0))
    return other


def all_answers(L: int) -> list[main.Trajectory]:
    """Every answer that ends with a stop token, or is cut off after L tokens."""
    others = [token for token in range(VOCABULARY) if token != STOP]
    ids = [[*start, STOP] for length in range(L)
           for start in itertools.product(others, repeat=length)]
    ids += itertools.product(others, repeat=L)
    question = main.Question({}, PROMPT)
    return [main.Trajectory(question, list(each), "", False) for each in ids]


def gradient_of(value: torch.Tensor, model) -> torch.Tensor:
    gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def measured(L: int, distance: float) -> dict[str, float]:
    model, answers = small_model(0.4), all_answers(L)
    lengths = [len(answer.completion_ids) for answer in answers]
    config = main.load_config(["training.kl_beta=1", f"training.max_new_gen_tokens={L}"])
    logprobs, _ = main.Policy(model, config)(answers)  # (tokens,), as below
    with torch.no_grad():
        reference, _ = main.Policy(moved(model, distance), config)(answers)
    store_in_answers(answers, reference_log_probs=reference)
    log_p = torch.stack([own.sum() for own in logprobs.split(lengths)])  # (answers,), as below
    log_p_ref = torch.stack([own.sum() for own in reference.split(lengths)])
    p = log_p.exp()
    exact = (p * (log_p - log_p_ref)).sum()
    found = {"L": L, "probability": p.sum().item(), "kl": exact.item()}
    for kl_in in ("reward", "loss"):
        training = config.training.model_copy(update={"kl_in": kl_in})
        each = [main.policy_loss(own, [answer], 1, 1, training)
                for own, answer in zip(logprobs.split(lengths), answers, strict=True)]
        mean = sum(probability * loss for probability, (loss, _) in zip(p.detach(), each))
        estimate = sum(probability * watched["kl"] for probability, (_, watched)
                       in zip(p.detach(), each))
        found["estimate / kl"] = (estimate / exact).item()
        ours, truth = gradient_of(mean * L, model), gradient_of(exact, model)
        found[f"cosine {kl_in}"] = float(torch.cosine_similarity(ours, truth, dim=0))
        found[f"length {kl_in}"] = float(ours.norm() / truth.norm())
    return found


def command() -> None:
    rows = [measured(L, distance) for L in (1, 4) for distance in (0.1, 0.3, 1.0)]
    print("| answers of | KL | `kl` over KL | cosine, `reward` | cosine, `loss` |\n"
          "| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {'one token' if row['L'] == 1 else 'up to four'} | {row['kl']:.3f} "
              f"| {row['estimate / kl']:.6f} | {row['cosine reward']:.6f} "
              f"| {row['cosine loss']:.6f} |")
    print(json.dumps(rows))


if __name__ == "__main__":
    command()
