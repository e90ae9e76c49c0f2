"""What tests of pipelines share: models, and training on one rank and on the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile

STEPS = 4
Batch = dict[str, torch.Tensor]


class UShape(nn.Module):
    """Skip connections over stages, a value that every layer reads, dropout, and a loss."""

    def __init__(self, depth: int = 3, width: int = 8, p: float = 0.1):
        super().__init__()
        self.inside = nn.Linear(width, width)
        self.down, self.up = (nn.ModuleList(self._layer(width, p) for _ in range(depth)) for _ in range(2))
        self.out = nn.Linear(width, 4)

    @staticmethod
    def _layer(width: int, p: float) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(p))

    def forward(self, x, labels):
        scale = torch.sigmoid(x.mean(-1, keepdim=True))
        h, kept = self.inside(x), []
        for layer in self.down:
            h = layer(h) * scale
            kept.append(h)
        for layer in self.up:
            h = layer(h + kept.pop()) * scale
        return nn.functional.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())


class Gated(nn.Module):
    """Layers that hand on two values, of which the last reads one without a gradient; a buffer that each layer writes."""

    def __init__(self, depth: int = 4, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))

    def forward(self, x, labels):
        gate = x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            made = norm(layer(x).transpose(1, 2)).transpose(1, 2)
            x, gate = torch.tanh(made) * (gate > 0), x + made
        return (x + gate.detach()).pow(2).mean()


class Convolved(nn.Module):
    """Convolutions with weights that are not contiguous, and scales without dimensions."""

    def __init__(self, depth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last) for _ in range(depth))
        self.scales = nn.ParameterList(torch.tensor(0.5) for _ in range(depth))

    def forward(self, x, labels):
        x = torch.stack([x, x], 1)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + torch.tanh(layer(x)) * scale
        return x.pow(2).mean()


class Stepped(nn.Module):
    """Rows in the second dimension, and a factor for each position that is equal in all rows: it is learned, and every layer reads it."""

    def __init__(self, depth: int = 4, width: int = 8):
        super().__init__()
        self.steps = nn.Parameter(torch.randn(16, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, labels):
        x = x.transpose(0, 1)
        factor = torch.sigmoid(self.steps[: x.shape[0]]).unsqueeze(1).expand(x.shape).contiguous()
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * factor
        return x.pow(2).mean()


class Supervised(nn.Module):
    """A loss behind each layer: the stages make losses of all rows, and the last one adds them."""

    def __init__(self, depth: int = 4, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in range(depth))

    def forward(self, x, labels):
        losses = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = x + torch.tanh(layer(x))
            losses.append(nn.functional.cross_entropy(head(x).flatten(0, 1), labels.flatten()))
        return sum(losses) / len(losses)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own (arXiv 2302.06675): the sign of a mean of momentum and gradient."""

    def __init__(self, parameters, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (of_sign, of_momentum) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(momentum.mul(of_sign).add_(p.grad, alpha=1 - of_sign).sign_(), alpha=-lr)
                momentum.mul_(of_momentum).add_(p.grad, alpha=1 - of_momentum)


def _text(kind: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('LMHeadModel')}Config")
    return getattr(transformers, kind)(config(vocab_size=32, **sizes))


_GROUPED = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def llama(layers: int, width: int = 16) -> nn.Module:
    sizes = {**_GROUPED, "hidden_size": width, "intermediate_size": 3 * width // 2}
    return _text("LlamaForCausalLM", num_hidden_layers=layers, **sizes)


MODELS = {
    "u_shape": UShape,
    "gated": Gated,
    "convolved": Convolved,
    "stepped": Stepped,
    "supervised": Supervised,
    "llama": lambda: llama(5),
    "mixtral": lambda: _text("MixtralForCausalLM", num_hidden_layers=4, num_local_experts=3, **_GROUPED),
    "gpt2": lambda: _text("GPT2LMHeadModel", n_embd=16, n_layer=4, n_head=2, n_positions=16, use_cache=False),
    "bert": lambda: _text(
        "BertForMaskedLM",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        hidden_dropout_prob=0.1,
    ),
    "t5": lambda: _text(
        "T5ForConditionalGeneration",
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    ),
}


@dataclass(frozen=True)
class Case:
    """A training loop. `optimizer` is `Lion`, or a class of `torch.optim`; `max_norm` clips in the loop, with PyTorch's own function."""

    model: str
    dtype: torch.dtype = torch.float32
    loops: int | None = None
    optimizer: str = "AdamW"
    max_norm: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = (6, 6, 6, 6)
    lengths: tuple[int, ...] = (7, 7, 7, 7)
    steps: int = STEPS

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the parameters that this rank has."""
        kind = Lion if self.optimizer == Lion.__name__ else getattr(torch.optim, self.optimizer)
        return kind(model.parameters(), lr=1e-2)

    def batch(self, step: int) -> Batch:
        """Rows of different numbers of labels that count."""
        rows, length = self.rows[step % len(self.rows)], self.lengths[step % len(self.lengths)]
        made = torch.Generator().manual_seed(step)
        if self.model in ("u_shape", "gated", "convolved", "stepped", "supervised"):
            return {
                "x": torch.randn(rows, length, 8, generator=made, dtype=self.dtype),
                "labels": torch.randint(0, 4, (rows, length), generator=made),
            }
        tokens = torch.randint(1, 32, (rows, length), generator=made)
        labels = tokens.clone()
        labels[torch.rand(tokens.shape, generator=made) < 0.3] = -100
        return {"input_ids": tokens, "labels": labels}


@dataclass(frozen=True)
class Trained:
    """What a rank has after training: losses, gradients of the first step, weights, the number of programs, and the compiled model."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    programs: int
    compiled: nn.Module


def train(case: Case, world: int = 1, **more: Any) -> Trained:
    """Some steps on one rank, or on the stages of a pipeline over `world` ranks; `more` are arguments of `pipeline`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    if world > 1:
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), **(more or {"batch": case.batch(0), "loops": case.loops}))
    return run(case, model, case.optimizer_of(model))


def run(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int | None = None, first: int = 0) -> Trained:
    """Some steps of a loop as users write it. One that begins behind the first step goes on with the random numbers that are there."""
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", **case.options}
    at_step = options.get("update", "at_step") == "at_step"
    if not at_step or options.get("precision") == "fp16":
        options["optimizer"] = optimizer
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    if first == 0:
        torch.manual_seed(1)
    losses, gradients = [], {}
    for step in range(first, first + (case.steps if steps is None else steps)):
        output = compiled(**case.batch(step))
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        losses.append(loss.detach())
        if at_step and step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(compiled)
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    losses = [loss.item() for loss in losses]
    return Trained(losses, gradients, weights, len(l2l_compile.programs(compiled)), compiled)


def compare(case: Case, world: int) -> tuple[set[str], set[str]]:
    """Train on one rank, and on a pipeline: asserts equal bits. Returns the names of this rank's state, and of all."""
    alone, staged = train(case), train(case, world)
    assert staged.losses == alone.losses
    for name, gradient in staged.gradients.items():
        assert torch.equal(gradient, alone.gradients[name]), f"gradient of {name}"
    for name, weight in staged.weights.items():
        assert torch.equal(weight, alone.weights[name]), name
    assert staged.programs == alone.programs
    return set(staged.weights), set(alone.weights)
