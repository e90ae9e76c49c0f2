"""Fine-tune a BERT that classifies text with `torch.compile(model, backend="l2l")`, in a run that can be killed and resumed.

    python examples/finetune.py                                           # is a passage of Python's help prose or code?
    python examples/finetune.py --data reviews.csv --model bert-base-uncased --lr 3e-5 --epochs 3
    python examples/finetune.py --output runs/long --save-every 50 --resume    # the same line starts it and continues it
    torchrun --nproc-per-node 2 examples/finetune.py --output runs/two         # divided among two processes

Parameters and AdamW's state stay in fp32 on the host. Layers are copied to the device and compute there in 16 bits; each layer
is updated while the next forward runs. Every batch is padded to its longest text. Layers are compiled at the first two lengths,
and never again. A run that was killed and resumed gives the same bits as an unbroken run: a checkpoint holds everything that a
step depends on, and gets its name only when it is complete. (Code that Inductor has compiled at another length may round
differently: the bits are the same with --padding max or --block-compiler eager.)

Under torchrun, each process has its part of the model, of the optimizer and of every batch. The steps equal the steps of one
process on whole batches, up to rounding (dropout too, if the number of processes divides --micro-batches). So a run may be
continued with another number of processes. Its checkpoints are folders of torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import json
import math
import os
import random
import shutil
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import huggingface_hub
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import l2l_compile

Examples = list[tuple[str, str]]  # text and label

WORDS = 12  # words in a passage of the default task
STEPS = {"prose": WORDS, "code": WORDS // 4}  # words from one passage to the next: there is less code, so its passages overlap
REST = "run.pt"  # file in a checkpoint's folder: all state besides model and optimizer
MAY_DIFFER = ("output", "save_every", "keep", "resume", "log_steps", "max_steps", "eval_every", "device")  # after a resume


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, help="csv, tsv or jsonl file with the columns text and label")
    source.add_argument("--dataset", help="name of a dataset with the columns text and label, loaded with the library datasets")
    parser.add_argument("--model", help="pretrained model by name or folder (default: a small BERT with random weights)")
    parser.add_argument("--layers", type=int, default=2, help="of the small BERT")
    parser.add_argument("--hidden", type=int, default=64, help="width of the small BERT, a multiple of 32")
    parser.add_argument("--length", type=int, default=64, help="tokens a text at most: longer ones are cut")
    parser.add_argument(
        "--padding",
        choices=("longest", "max"),
        default="longest",
        help="pad texts to the longest of their batch, or all to --length",
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=2,
        help="slices of a whole batch that go through a layer in turn, shared among the processes",
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate; 3e-5 suits a pretrained model")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps in which the learning rate rises")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="bf16",
        help="fp16 scales the loss. The scale is not in a checkpoint, a resumed run starts again at 65536: its "
        "bits are those of an unbroken run only as long as that keeps this scale as well",
    )
    parser.add_argument("--device", help="where the layers run (default: the accelerator if there is one, else cpu)")
    parser.add_argument("--block-compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, help="stop after so many steps; the learning rate is that of the whole run")
    parser.add_argument("--eval-every", type=int, default=0, help="evaluate every so many steps, besides the ends of epochs")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder for checkpoints and the final model")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (default: none)")
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints to keep")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output, if there is one")
    parser.add_argument("--log-steps", action="store_true", help="print a line when a step begins")
    args = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "keep"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


# ---- data ------------------------------------------------------------------------------------------------------------


def documentation() -> tuple[Examples, Examples]:
    """Passages of Python's help, prose or code, for training and validation.

    All words of a kind are cut into blocks, and every fourth block is for validation. Passages stay inside of a block. A
    repeated paragraph is used once, and training passages that share eight words in a row with validation are removed.
    """
    words: dict[str, list[str]] = {kind: [] for kind in STEPS}
    for paragraph in dict.fromkeys(p for name in sorted(topics) for p in topics[name].split("\n\n")):
        kind = kind_of(paragraph)
        if kind:
            words[kind] += paragraph.split()
    splits: tuple[Examples, Examples] = [], []
    size = 2 * WORDS
    for kind, step in STEPS.items():
        blocks = [words[kind][start : start + size] for start in range(0, len(words[kind]) - size + 1, size)]
        for number, block in enumerate(blocks):
            passages = [" ".join(block[i : i + WORDS]) for i in range(0, size - WORDS + 1, step)]
            splits[number % 4 == 3].extend((passage, kind) for passage in passages)
    train, validation = splits
    held_out = set().union(*(runs_of_words(text) for text, _ in validation))
    return [e for e in train if held_out.isdisjoint(runs_of_words(e[0]))], validation


def kind_of(paragraph: str) -> str | None:
    """ "code" for sessions, grammar and text that Python can parse, "prose" for other sentences, None for the rest."""
    text = paragraph.strip()
    if len(text.split()) < 3:
        return None
    if ">>> " in text or "::=" in text:
        return "code"
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(textwrap.dedent(paragraph.strip("\n")))
    except SyntaxError:
        return "prose" if text[0].isupper() and text.endswith(".") else None
    return "code"


def runs_of_words(text: str, count: int = 8) -> set[str]:
    """All runs of `count` words in a text; the whole text if it is shorter."""
    words = text.split()
    return {" ".join(words[i : i + count]) for i in range(max(1, len(words) - count + 1))}


def read_file(path: Path) -> Examples:
    """The rows of a csv, tsv or jsonl file."""
    if not path.is_file():
        raise SystemExit(f"{path} is not a file")
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in file if line.strip()]
        else:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    return examples_of(rows, str(path))


def read_dataset(name: str) -> tuple[Examples, Examples]:
    """A dataset's rows for training and validation. Without a validation or test split, some training rows are held out."""
    try:
        import datasets
    except ImportError:
        raise SystemExit("--dataset needs the library datasets: pip install datasets, or give a file with --data") from None
    loaded = datasets.load_dataset(name)
    held_out = next((s for s in ("validation", "test") if s in loaded), None)
    names = getattr(loaded["train"].features.get("label"), "names", None)
    splits = [examples_of(loaded[s], name, names) for s in ("train", held_out) if s]
    return tuple(splits) if held_out else hold_out(splits[0])


def examples_of(rows, source: str, names: list[str] | None = None) -> Examples:
    """The texts and labels of rows with the columns text and label. With `names`, labels are indices into it."""
    try:
        return [(row["text"], names[row["label"]] if names else str(row["label"])) for row in rows]
    except KeyError as missing:
        raise SystemExit(f"{source} has no column {missing}: the columns text and label are needed") from None


def hold_out(examples: Examples) -> tuple[Examples, Examples]:
    """Hold out a tenth of the examples for validation, always the same ones. A text that occurs twice is used once."""
    unique = list(dict(reversed(examples)).items())
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(0)).tolist()
    count = max(1, len(unique) // 10)
    return [unique[i] for i in order[count:]], [unique[i] for i in order[:count]]


def load_examples(args: argparse.Namespace) -> tuple[Examples, Examples]:
    """Examples for training and for validation."""
    if args.dataset:
        return read_dataset(args.dataset)
    return hold_out(read_file(args.data)) if args.data else documentation()


def build_tokenizer(texts: list[str], size: int = 6000) -> transformers.PreTrainedTokenizerBase:
    """WordPiece with the most frequent words of the texts. Words that occur only once are unknown."""
    split = BertPreTokenizer().pre_tokenize_str
    count = Counter(word for text in texts for word, _ in split(text.lower()))
    words = sorted((w for w in count if count[w] > 1), key=lambda w: (-count[w], w))[:size]
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return transformers.BertTokenizer(vocab={entry: i for i, entry in enumerate(entries)})


def encode(examples: Examples, labels: list[str], tokenizer, length: int) -> dict[str, torch.Tensor]:
    """All examples as tensors, padded to `length` tokens."""
    batch = tokenizer([t for t, _ in examples], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {**batch, "labels": torch.tensor([labels.index(label) for _, label in examples])}


# ---- model and training ----------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace, labels: list[str], vocabulary: int) -> transformers.PreTrainedModel:
    """A classifier in fp32 on the host: pretrained by name, or a small BERT with random weights."""
    names = dict(enumerate(labels))
    heads = {"id2label": names, "label2id": {n: i for i, n in names.items()}, "problem_type": "single_label_classification"}
    if args.model and dist.is_initialized():  # `fill` later reads this process's part of the weights
        config = transformers.AutoConfig.from_pretrained(args.model, **heads)
        with torch.device("meta"):
            return transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).train()
    if args.model:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(args.model, dtype=torch.float32, **heads)
        return model.train()
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=vocabulary,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32,
            intermediate_size=4 * args.hidden,
            max_position_embeddings=args.length,
            **heads,
        )
    )


def fill(model: torch.nn.Module, name: str) -> None:
    """Read this process's part of a pretrained model. A classifier that the folder lacks is initialised anew."""
    folder = name if Path(name).is_dir() else huggingface_hub.snapshot_download(name, allow_patterns="*.safetensors*")
    found = l2l_compile.load_pretrained(model, folder, strict=False)
    if rank() == 0:
        print(f"new: {', '.join(found.missing_keys) or 'nothing'}; left out: {', '.join(found.unexpected_keys) or 'nothing'}")


def build_optimizer(model: torch.nn.Module, args: argparse.Namespace, steps: int):
    """AdamW without weight decay for vectors (biases and norms), and a learning rate that rises and then falls linearly."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    warmup = max(1, round(args.warmup * steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup)))
    )
    return optimizer, scheduler


def rows_of_epoch(count: int, args: argparse.Namespace, epoch: int) -> torch.Tensor:
    """The rows of each batch of an epoch, [batches, batch size], from seed and epoch alone. An incomplete batch is dropped."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
    batches = count // args.batch_size
    return torch.randperm(count, generator=generator)[: batches * args.batch_size].view(batches, args.batch_size)


def batch_of(data: dict[str, torch.Tensor], rows: torch.Tensor, padding: str) -> dict[str, torch.Tensor]:
    """The batch of these rows. If `padding` is "longest", it is cut to the length of the longest row."""
    batch = {name: values[rows] for name, values in data.items()}
    longest = int(batch["attention_mask"].sum(1).max())
    cut = {name: values[:, :longest].contiguous() for name, values in batch.items() if values.ndim > 1}
    return {**batch, **cut} if padding == "longest" else batch


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of this process; all rows without torchrun."""
    return {name: values.tensor_split(world())[rank()] for name, values in batch.items()} if world() > 1 else batch


def of_all_ranks(count: torch.Tensor) -> torch.Tensor:
    """The sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(count)
    return count


@torch.no_grad()
def accuracy(model: torch.nn.Module, compiled, data: dict[str, torch.Tensor], batch_size: int, padding: str) -> float:
    """The share of examples that the model classifies correctly. The last batch is filled up with rows that do not count."""
    count = len(data["labels"])
    rows = torch.arange(math.ceil(count / batch_size) * batch_size).clamp(max=count - 1).split(batch_size)
    inputs = {name: values for name, values in data.items() if name != "labels"}
    model.eval()
    with torch.random.fork_rng(devices=[]):  # evaluation does not change the random numbers of training
        found = [compiled(**own_rows(batch_of(inputs, r, padding))).logits.argmax(-1) for r in rows]
    model.train()
    places = torch.arange(len(rows) * batch_size).split(batch_size)
    expected = [own_rows({"place": p, "label": data["labels"][r]}) for p, r in zip(places, rows, strict=True)]
    right = [(f == e["label"]) & (e["place"] < count) for f, e in zip(found, expected, strict=True)]
    return of_all_ranks(torch.cat(right).sum()).item() / count


def train(args, model, optimizer, scheduler, train_data, validation_data, state: dict | None, must_match: dict) -> float:
    """The training loop, an ordinary PyTorch loop, from the start or from a checkpoint. Returns the last accuracy."""
    options = {
        "micro_batches": max(1, args.micro_batches // world()),
        "precision": args.precision,
        "optimizer": optimizer,
        "update": "in_forward",
        "max_grad_norm": 1.0,
        "block_compiler": args.block_compiler,
        "batch_scope": "global",  # a batch is shared by all processes
    }
    if args.device:
        options["device"] = args.device
    compiled = torch.compile(model, backend="l2l", options=options, fullgraph=dist.is_initialized())

    count = len(train_data["labels"])
    per_epoch = count // args.batch_size
    last = min(args.epochs * per_epoch, args.max_steps or math.inf)
    step, best, now = restore(args, state, model, optimizer, scheduler) if state else (0, 0.0, 0.0)
    bar = tqdm(total=last, initial=step, desc="training (the first step compiles)", unit="step", disable=rank() > 0)
    while step < last:
        epoch, batch = divmod(step, per_epoch)
        if args.log_steps and rank() == 0:
            print(f"step {step + 1} begins", flush=True)
        rows = rows_of_epoch(count, args, epoch)[batch]
        loss = compiled(**own_rows(batch_of(train_data, rows, args.padding))).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1

        norm = l2l_compile.stats(compiled).gradient_norm
        bar.set_description(f"epoch {epoch + 1}", refresh=False)
        bar.set_postfix_str(f"loss {loss.item():.3f}, |g| {norm:.2f}, lr {scheduler.get_last_lr()[0]:.1e}", refresh=False)
        bar.update()
        if step % per_epoch == 0 or step == last or args.eval_every and step % args.eval_every == 0:
            now = accuracy(model, compiled, validation_data, args.batch_size, args.padding)
            best = max(best, now)
            if rank() == 0:
                tqdm.write(f"step {step}, epoch {step / per_epoch:.2f}: accuracy {now:.1%}, best {best:.1%}")
        if args.save_every and step % args.save_every == 0:
            position = {"step": step, "epoch": step // per_epoch, "batch": step % per_epoch, "accuracy": now, "best": best}
            save = save_sharded if dist.is_initialized() else save_checkpoint
            save(args.output, args.keep, snapshot(model, optimizer, scheduler, position, must_match))
    bar.close()
    return now


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def snapshot(model, optimizer, scheduler, position: dict, must_match: dict) -> dict:
    """The whole state that the next step depends on. `state_dict` waits for updates that are still running."""
    divided = dist.is_initialized()
    of_model, of_optimizer = get_state_dict(model, optimizer) if divided else (model.state_dict(), optimizer.state_dict())
    return {
        "model": of_model,
        "optimizer": of_optimizer,
        "scheduler": scheduler.state_dict(),
        "position": position,
        "must_match": must_match,
        "random": {"torch": torch.get_rng_state(), "python": random.getstate()},
    }


def restore(args, state: dict, model, optimizer, scheduler) -> tuple[int, float, float]:
    """Restore the state of a run. Returns the number of steps done, the best accuracy so far, and the last accuracy."""
    if dist.is_initialized():
        load_sharded(args.output / name_of(state["position"]["step"]), model, optimizer)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"]["torch"])
    random.setstate(state["random"]["python"])
    return state["position"]["step"], state["position"]["best"], state["position"]["accuracy"]


def name_of(step: int) -> str:
    """The name of a checkpoint. Sorted names are in the order of steps."""
    return f"step-{step:09d}"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def save_checkpoint(folder: Path, keep: int, state: dict) -> None:
    """Write a checkpoint, then delete all but the last `keep`."""
    write_atomically(folder / f"{name_of(state['position']['step'])}.pt", lambda path: torch.save(state, path))
    for old in checkpoints(folder)[:-keep]:
        remove(old)


def save_sharded(folder: Path, keep: int, state: dict) -> None:
    """As `save_checkpoint`, by all processes: each writes its part of the model and of the optimizer into one folder."""
    path = folder / name_of(state["position"]["step"])
    partial = path.with_name(path.name + ".partial")
    dcp.save({name: state.pop(name) for name in ("model", "optimizer")}, checkpoint_id=partial)
    if rank() == 0:
        torch.save(state, partial / REST)
        publish(partial, path)
        for old in checkpoints(folder)[:-keep]:
            remove(old)
    dist.barrier()


def load_sharded(folder: Path, model, optimizer) -> None:
    """Read this process's part of a checkpoint. Another number of processes may have written the folder."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def load_checkpoint(folder: Path, must_match: dict) -> dict | None:
    """The last checkpoint of a folder, or None. Ends the program if it belongs to a run with other arguments."""
    found = checkpoints(folder)
    if not found:
        return None
    if found[-1].is_dir() != dist.is_initialized():
        raise SystemExit(f"{found[-1]} was written {'under' if found[-1].is_dir() else 'without'} torchrun: continue it so")
    state = torch.load(found[-1] / REST if found[-1].is_dir() else found[-1], weights_only=True)
    before = state["must_match"]
    other = [f"{k} was {before.get(k)!r} and is {v!r}" for k, v in must_match.items() if before.get(k) != v]
    if other:
        raise SystemExit(f"{found[-1]} cannot be continued with other arguments: {'; '.join(other)}")
    return state


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a path beside `path`, and rename the result to `path` once it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    remove(partial)
    write(partial)
    publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Rename a file or folder to its final name once it is on the disk."""
    for written in (partial, *partial.rglob("*")):
        sync(written)
    if path.is_dir():  # a folder cannot be replaced by another
        shutil.rmtree(path)
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_output(args: argparse.Namespace, must_match: dict) -> dict | None:
    """Make the output folder, and delete half-written files of a killed run. Returns the checkpoint to continue, or None."""
    if rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        for partial in args.output.glob("*.partial"):
            remove(partial)
    if dist.is_initialized():
        dist.barrier()
    if not args.resume:
        if checkpoints(args.output):
            raise SystemExit(f"{args.output} holds checkpoints of a run: continue it with --resume, or choose another --output")
        return None
    state = load_checkpoint(args.output, must_match)
    if rank() == 0:
        print(
            f"continuing after step {state['position']['step']}" if state else f"no checkpoint in {args.output}: it starts anew"
        )
    return state


def main() -> None:
    args = parse_arguments()
    if "WORLD_SIZE" in os.environ:  # torchrun has started this process
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    examples = load_examples(args)
    count = len(examples[0])
    if count < args.batch_size:
        raise SystemExit(f"{count} training examples do not fill one batch of {args.batch_size}")
    labels = sorted({label for split in examples for _, label in split})
    load = transformers.AutoTokenizer.from_pretrained
    tokenizer = load(args.model) if args.model else build_tokenizer([text for text, _ in examples[0]])
    train_data, validation_data = (encode(split, labels, tokenizer, args.length) for split in examples)
    must_match = {name: str(value) for name, value in vars(args).items() if name not in MAY_DIFFER}
    must_match["digest of the examples"] = hashlib.sha256(json.dumps(examples).encode()).hexdigest()
    state = open_output(args, must_match)

    model = build_model(args, labels, len(tokenizer))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    if dist.is_initialized():
        l2l_compile.shard(model, init_device_mesh("cpu", (world(),)))
        if args.model:
            fill(model, args.model)
    optimizer, scheduler = build_optimizer(model, args, args.epochs * (count // args.batch_size))
    if rank() == 0:
        print(
            f"{size:.1f} M parameters, {len(labels)} classes, {count:,} examples to train with, {len(examples[1]):,} to validate"
        )
    final = train(args, model, optimizer, scheduler, train_data, validation_data, state, must_match)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole) if dist.is_initialized() else None
    if rank() > 0:
        return

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)

    write_atomically(args.output / "final", save)
    largest = validation_data["labels"].bincount().max().item() / len(examples[1])
    print(f"saved to {args.output / 'final'}; validation accuracy {final:.1%} (always the most frequent class: {largest:.1%})")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
