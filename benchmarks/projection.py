"""The projection's solver against the two public ones: 24 bisections of t, and 8-point bracketing in up to 20 rounds.

    python benchmarks/projection.py
    python benchmarks/projection.py --model PATH --problems data/gsm8k/train.jsonl   # real rows too

All three solve KL(π_t‖q) = ε in float64 for rows outside of the bound of 0.05, 65 slots each. One evaluation computes
π_t for one row. Ours stops each row at 1e-5·ε, as in training; bracketing stops a batch when all its rows have reached
that. "error" is |KL − ε|/ε. The time of `project` covers a forward and a backward pass over all rows, inside and
outside of the bound, in float32.

In synthetic rows, the old policy is a softmax of normal logits of a given spread; the policy's logits add normal noise
of the same spread. Real rows are a model's sparse distributions on real problems, before and after three optimizer
steps on the same problems.

Floor: an evaluation reads log q and d and writes log π, once, in float64.
"""

import json
import math
import sys
from pathlib import Path

import torch
from common import Floor, Report, paired_seconds, parser, ratio
from transformers import AutoModelForCausalLM, AutoTokenizer

from troll_trl import project
from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.trust_region.projection import kl_divergence, solve

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.references import reference_kl

BOUND = 0.05
SLOTS = 65
TOLERANCE = 1e-5


def family(t: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`log π_t` `(M, S)` and its KL to q `(M,)`, at `t` `(M,)`."""
    log_pi = torch.log_softmax(log_q + t.unsqueeze(1) * (log_p - log_q), 1)
    return log_pi, kl_divergence(log_pi, log_q)


def bisection(log_p, log_q):
    low, high = torch.zeros_like(log_p[:, 0]), torch.ones_like(log_p[:, 0])
    for _ in range(24):
        middle = (low + high) / 2
        inside = family(middle, log_p, log_q)[1] <= BOUND
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return family(low, log_p, log_q)[0], torch.full_like(low, 25)


def bracketing(log_p, log_q):
    """Search for the multiplier between 1e-6 and 1e6, on a logarithmic scale, because it spans orders of magnitude."""
    rows = len(log_p)
    low, high = (
        torch.full((rows, 1), x, dtype=log_p.dtype, device=log_p.device) for x in (math.log(1e-6), math.log(1e6))
    )
    evaluations = 1  # of the result
    for _ in range(20):
        points = low + (high - low) * torch.linspace(0, 1, 8, dtype=low.dtype, device=low.device)  # (M, 8) log η
        evaluations += 8
        flat = lambda x: x.repeat_interleave(8, 0)
        kl = family(torch.sigmoid(-points).flatten(), flat(log_p), flat(log_q))[1].view(rows, 8)
        # KL falls as η grows: the root is between the last point outside of the bound and the first inside
        first = (kl > BOUND).sum(1, keepdim=True).clamp(1, 7)
        low, high = points.gather(1, first - 1), points.gather(1, first)
        if ((kl.gather(1, first) - BOUND).abs() <= TOLERANCE * BOUND).all():
            break
    return family(torch.sigmoid(-high).squeeze(1), log_p, log_q)[0], torch.full_like(log_p[:, 0], evaluations)


def newton(log_p, log_q):
    _, log_pi, _, evaluations = solve(log_p, log_q, BOUND, TOLERANCE)
    return log_pi, evaluations


SOLVERS = {"ours": newton, "bisection": bisection, "bracketing": bracketing}


def synthetic(spread: float, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and old policy `(rows, 65)`, float32."""
    generator = torch.Generator().manual_seed(0)
    old = spread * torch.randn(rows, SLOTS, generator=generator)
    move = spread * torch.randn(rows, SLOTS, generator=generator)
    return tuple(x.double().log_softmax(1).float().to(device) for x in (old + move, old))


def real(model_path: str, problems: Path, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and old policy `(up to rows, 65)` of a model, after and before three steps of AdamW on problems."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device)
    add_sparse_lm_head(model)
    texts = [json.loads(line) for line in problems.read_text().splitlines()[:8]]
    text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in texts)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : rows + 1].to(device)
    call = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
    with torch.no_grad():
        old = model(**call, support_size=SLOTS - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        (-model(**call, token_ids=old.token_ids).log_probs.mean()).backward()
        optimizer.step()
    with torch.no_grad():
        policy = model(**call, token_ids=old.token_ids)
    return policy.sparse_log_probs[0], old.sparse_log_probs[0]


def measure(report: Report, floor: Floor, args, name: str, log_p: torch.Tensor, log_q: torch.Tensor) -> None:
    policy_kl = kl_divergence(log_p.double(), log_q.double())
    # A slot that is unused in both contributes nothing. A number instead of −∞ spares the other solvers a special case
    fill = lambda x: x.double().masked_fill(x == -math.inf, -200.0)
    p, q = (fill(x[policy_kl > BOUND]) for x in (log_p, log_q))
    leaf = log_p.clone().requires_grad_()

    def whole():
        pi = project(leaf, log_q, BOUND).log_probs
        torch.autograd.grad(pi.masked_fill(pi == -math.inf, 0.0).sum(), leaf)

    runs = {solver: lambda solve=solve_rows: solve(p, q) for solver, solve_rows in SOLVERS.items()}
    seconds = paired_seconds({**runs, "project": whole}, args.repeats, args.device)
    middle = args.repeats // 2
    for solver, run in runs.items():
        log_pi, evaluations = run()
        kl = torch.from_numpy(reference_kl(log_pi.cpu().numpy(), q.cpu().numpy()))
        error = (kl - BOUND).abs() / BOUND
        counts = evaluations.double()
        least = floor.seconds(0, counts.sum().item() * SLOTS * 8 * 3)
        took = sorted(seconds[solver])[middle]
        report.add(
            **{"rows": name, "solver": solver, "outside": len(p), "of": len(log_p)},
            **{"evaluations": counts.median().item(), "p99": counts.quantile(0.99).item(), "max": counts.max().item()},
            **{"error median": error.median().item(), "error max": error.max().item()},
            **{"us/row": 1e6 * took / len(p), "took/floor": took / least},
            **{"time/ours": 1 / ratio(seconds["ours"], seconds[solver])["ratio"] if solver != "ours" else None},
            **{"project us/row": 1e6 * sorted(seconds["project"])[middle] / len(log_p) if solver == "ours" else None},
            seconds=seconds[solver],
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, help="rows of every kind (default: 65,536 on a GPU, 2,048 on a CPU)")
    options.add_argument("--model", help="local path or name of a model, for real rows")
    options.add_argument("--problems", type=Path, help="JSON lines with `question` and `answer`, for real rows")
    args = options.parse_args()
    rows = args.rows or (65_536 if args.device == "cuda" else 2048)
    columns = {"rows": "", "solver": "", "outside": ",", "of": ",", "evaluations": ".0f", "p99": ".0f", "max": ".0f"}
    columns |= {"error median": ".1e", "error max": ".1e", "us/row": ".2f", "time/ours": ".2f", "took/floor": ".1f"}
    report = Report("projection", args, columns | {"project us/row": ".2f"})
    floor = Floor(args.device, torch.float64)
    report.start(f"{floor}.")
    for spread in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
        measure(report, floor, args, f"spread {spread:g}", *synthetic(spread, rows, args.device))
    if args.model and args.problems:
        measure(report, floor, args, "real", *real(args.model, args.problems, min(rows, 1024), args.device))
    else:
        print("\nNo real rows: they need --model and --problems.")
    report.save()


if __name__ == "__main__":
    main()
