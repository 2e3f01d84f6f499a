"""The independent reference: a plain loop in one process, with nothing of the product in it."""

import math

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM


def train(path, batches, *, master, compute, reduce, lrs, decay, max_norm=None, every="micro_batch"):
    """Over batches[step][micro][rank] = (ids, shifted labels): loss, norms (also clipped) and masters of each step."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").train()
    masters = {n: p.detach().to(master).clone().requires_grad_() for n, p in model.named_parameters()}
    groups = [{"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": decay}]
    groups += [{"params": [p for p in masters.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    log = []
    for window, lr in zip(batches, lrs, strict=True):
        for n, p in model.named_parameters():
            p.data = masters[n].detach().to(compute)
        tokens = sum(int((labels != -100).sum()) for micro in window for _, labels in micro)
        losses, grads = [], [[] for _ in window]
        for micro, of_ranks in zip(window, grads, strict=True):
            for inputs, labels in micro:
                logits = model(input_ids=inputs, use_cache=False).logits.float()
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
                losses.append(loss.item())
                model.zero_grad()
                (loss / tokens).backward()
                of_ranks.append([p.grad.to(reduce) for p in model.parameters()])
        if every == "micro_batch":  # cross the ranks, then accumulate
            total = in_turn([pairwise(ranks) for ranks in grads])
        else:  # accumulate on every rank, then cross
            total = pairwise([in_turn(of_micros) for of_micros in zip(*grads, strict=True)])
        for p, g in zip(masters.values(), total, strict=True):
            p.grad = g.to(master)
        norm = clipped = norm_of(masters.values())
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(masters.values(), max_norm, torch.tensor(norm))
            clipped = norm_of(masters.values())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        log.append((math.fsum(losses) / tokens, norm, clipped, {n: p.detach().clone() for n, p in masters.items()}))
    return log


def in_turn(parts):
    return parts[0] if len(parts) == 1 else [a + b for a, b in zip(in_turn(parts[:-1]), parts[-1], strict=True)]


def pairwise(parts):
    while len(parts) > 1:
        parts = [in_turn(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def norm_of(parameters):
    squares = (x for p in parameters for x in p.grad.double().square().flatten().tolist())
    return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float32).item()
