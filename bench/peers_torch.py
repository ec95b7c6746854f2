"""Peers in PyTorch: Opacus with hooks, Opacus ghost clipping, torch.func vmap, and the plain gradient."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bench.brought_torch import Net
from bench.peer import Build, Peer
from bench.peers_jax import clip_of
from bench.workloads import Tree, Workload

warnings.filterwarnings("ignore", message=".*non-full backward hook.*|.*Full backward hook.*")
CHUNK_BYTES = 1e8  # of gradients that torch.func holds at one time, where not all may be
NO_PENALTY = "without the penalty, which it cannot add to a record's gradient"


def record_losses(loss: str, scores: Tensor, targets: Tensor) -> Tensor:
    if loss == "squared":
        return (scores[:, 0] - targets) ** 2
    if loss == "logistic":
        return F.softplus((1 - 2 * targets) * scores[:, 0])
    return F.cross_entropy(scores, targets, reduction="none")


def penalty(weight: float, params: Any) -> Any:
    return weight * sum((x * x / (1 + x * x)).sum() for x in params) if weight else 0.0


def batch(work: Workload) -> tuple[Tensor, Tensor]:
    targets = torch.from_numpy(work.targets)
    return torch.from_numpy(work.features), targets.long() if work.loss == "cross-entropy" else targets


def as_tree(named: dict[str, Tensor]) -> Tree:
    tree: Tree = {}
    for name, value in named.items():
        *_, layer, leaf = name.split(".")
        tree.setdefault(layer, {})[leaf] = value.detach().numpy().copy()
    return tree


def plain(work: Workload, points: int) -> Peer:
    net, (features, targets) = Net(work.point(0), work), batch(work)

    def run() -> dict[str, Tensor]:
        net.zero_grad()
        loss = record_losses(work.loss, net(features), targets).mean() + penalty(work.penalty, net.parameters())
        loss.backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    return Peer(run, as_tree, clipped=False)


def clip_and_mean(rows: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    factors = (clip / norms).clamp(max=1) / len(norms)
    return {name: torch.tensordot(factors, g, 1) for name, g in rows.items()}


def func_vmap(work: Workload, points: int) -> Peer:
    nets = [Net(point, work) for point in work.points(points)]
    features, targets = batch(work)
    clip = clip_of(work, points)

    def loss(params: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        scores = functional_call(nets[0], params, (x[None],))
        return record_losses(work.loss, scores, t[None])[0] + penalty(work.penalty, params.values())

    rows_at = vmap(grad(loss), in_dims=(None, 0, 0))
    params = [{name: p.detach() for name, p in net.named_parameters()} for net in nets]

    def clipped(x: Tensor, t: Tensor) -> dict[str, Tensor]:
        rows = [rows_at(p, x, t) for p in params]
        if points == 2:
            rows[0] = {name: g - rows[1][name] for name, g in rows[0].items()}
        return clip_and_mean(rows[0], clip)

    def run() -> dict[str, Tensor]:
        if work.all_fit:
            return clipped(features, targets)
        size = max(1, int(CHUNK_BYTES // (4 * work.parameters)))
        parts = [(len(x), clipped(x, t)) for x, t in zip(features.split(size), targets.split(size), strict=True)]
        return {name: sum(n * part[name] for n, part in parts) / work.records for name in params[0]}

    return Peer(run, as_tree, note="" if work.all_fit else "in chunks of about 100 MB of gradients")


def opacus_hooks(work: Workload, points: int) -> Peer | None:
    """One point: Opacus's own optimizer clips. Two points: its per-record gradients, subtracted and clipped by hand."""
    if not work.all_fit:
        return None
    nets: list[Any] = [GradSampleModule(Net(point, work)) for point in work.points(points)]
    features, targets = batch(work)
    clip, count = clip_of(work, points), work.records
    sgd = torch.optim.SGD(nets[0].parameters(), lr=1.0)
    optimizer = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=count)

    def rows_at(net: Any) -> None:
        net.zero_grad(set_to_none=True)
        record_losses(work.loss, net(features), targets).mean().backward()
        for p in net.parameters() if work.penalty else ():
            x = p.detach().requires_grad_()
            p.grad_sample = p.grad_sample + torch.autograd.grad(penalty(work.penalty, [x]), x)[0]

    def run() -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        for net in nets:
            rows_at(net)
        named = list(nets[0].named_parameters())
        if points == 2:
            other = list(nets[1].parameters())
            return clip_and_mean(
                {n: p.grad_sample - q.grad_sample for (n, p), q in zip(named, other, strict=True)}, clip
            )
        optimizer.clip_and_accumulate()
        return {name: p.summed_grad / count for name, p in named}

    return Peer(run, as_tree)


def opacus_ghost(work: Workload, points: int) -> Peer | None:
    # It only ever sees one point: two clipped passes are not a clipped difference. Of a layer that is called again and
    # again it adds the norms of the calls, not their gradients.
    if points == 2 or work.kind == "gru":
        return None
    clip: Any = clip_of(work, points)
    count = work.records
    net: Any = GradSampleModuleFastGradientClipping(
        Net(work.point(0), work), max_grad_norm=clip, use_ghost_clipping=True
    )
    features, targets = batch(work)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=count
    )
    criterion = DPLossFastGradientClipping(net, optimizer, Criterion(work.loss), loss_reduction="mean")

    def run() -> dict[str, Tensor]:
        optimizer.zero_grad()
        criterion(net(features), targets).backward()
        optimizer.accumulate()
        return {name: p.summed_grad / count for name, p in net.named_parameters()}

    return Peer(run, as_tree, note=NO_PENALTY, same=False) if work.penalty else Peer(run, as_tree)


class Criterion(nn.Module):
    """A loss in the form Opacus asks for: it sets `reduction` to "none" itself."""

    def __init__(self, loss: str):
        super().__init__()
        self.loss, self.reduction = loss, "mean"

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return record_losses(self.loss, scores, targets)


PEERS: dict[str, Build] = {
    "plain gradient, PyTorch": plain,
    "Opacus hooks": opacus_hooks,
    "Opacus ghost clipping": opacus_ghost,
    "torch.func vmap": func_vmap,
}
