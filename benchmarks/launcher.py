"""What the launcher costs, side by side in one run: start-up, ``burst check``, bundles. Nothing asserts; goals are printed.

    python benchmarks/launcher.py [--size-gb 1.0] [--only startup,check,bundle] [--datasets-python PATH]

Run it with the launcher's environment on a quiet machine. The check works on a generated file of ``messages`` rows and a
byte-level BPE tokenizer trained on a sample of it. ``--datasets-python`` has ``datasets`` installed (default: burst env's).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 11
VOCABULARY = 16384

# Each is run as `python -c CODE FILE MODEL`, prints one JSON object, and is measured as a whole process.
READ_AND_CHECK = """
import json, os, sys, time
from pathlib import Path
from burst import dataset
from burst.dedupe import Finder, Place
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
path = Path(sys.argv[1])
began, finder, rows = time.perf_counter(), Finder(), 0
file = dataset.locate(path.parent, path.name, "train")
for row in dataset.read(file, "auto", dataset.FileFacts(None), lambda *_: None):
    finder.add(row.content, Place(0, row.number), False)
    rows += 1
finder.finish()
print(json.dumps({"s": time.perf_counter() - began, "rows": rows}))
"""
FULL_CHECK = """
import json, sys, time
from pathlib import Path
from burst import check, spec
path = Path(sys.argv[1])
value = {"model": sys.argv[2], "data": {"train": path.name, "max_length": 8192}}
began = time.perf_counter()
report = check.check(spec.Spec.model_validate(value), path.parent)
assert report.ok, report.issues.shown
print(json.dumps({"s": time.perf_counter() - began, "rows": report.train.rows, "tokens": report.train.lengths.total}))
"""
TOKENIZERS_ALONE = """
import json, sys, time
from pathlib import Path
from burst.check import BATCH_CHARACTERS
from burst_payload import chat, tokens
facts = tokens.load(Path(sys.argv[2]))
renderer = chat.Renderer(facts, facts.chat_template)
seconds = count = total = 0
batch, characters = [], 0
def encode():
    global seconds, total
    began = time.perf_counter()
    encodings = facts.tokenizer.encode_batch(batch, add_special_tokens=False)
    seconds += time.perf_counter() - began
    total += sum(map(len, encodings))
    batch.clear()
for line in open(sys.argv[1], "rb"):  # reading and rendering are not counted: the time is the tokenizer's alone
    batch.append(renderer.chat.render(json.loads(line)["messages"], generation_prompt=False))
    characters += len(batch[-1])
    if characters >= BATCH_CHARACTERS:
        encode()
        characters = 0
encode()
print(json.dumps({"s": seconds, "tokens": total}))
"""
DATASETS = """
import json, sys, tempfile, time
from datasets import load_dataset
from transformers import AutoTokenizer
began = time.perf_counter()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
with tempfile.TemporaryDirectory() as cache:
    rows = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=cache)
    loaded = time.perf_counter() - began
    def encode(batch):
        texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}
    rows = rows.map(encode, batched=True, remove_columns=rows.column_names)
    total = sum(len(ids) for batch in rows.iter(1000) for ids in batch["input_ids"])
print(json.dumps({"s": time.perf_counter() - began, "load_s": loaded, "tokens": total}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--only", default="startup,check,bundle")
    parser.add_argument("--datasets-python")
    options = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}  Python {platform.python_version()}  {cpu_name()}  {os.cpu_count()} cores  "
        f"load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as work:
        if "startup" in options.only:
            startup(Path(work))
        if "check" in options.only:
            check(Path(work), options.size_gb, options.datasets_python)
        if "bundle" in options.only:
            bundle(Path(work))


def startup(work: Path) -> None:
    """Median wall time of each command, interleaved, so that a busy moment hits all of them."""
    folder = Path(sys.executable).parent
    commands = {"python -c pass": [sys.executable, "-c", "pass"]}
    for name, folders in {"burst": [folder], "hf": [training_python().parent, folder], "sky": [folder]}.items():
        # SkyPilot's click pin breaks the hf of the launcher's own environment, so the training environment's goes first
        found = next((path for place in folders if (path := place / name).exists()), None)
        if found and subprocess.run([found, "--help"], capture_output=True, check=False, cwd=work).returncode == 0:
            commands[f"{name} --help"] = [str(found), "--help"]
        else:
            print(f"{name} is {'not working' if found else 'not installed'}: left out")
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(REPEATS):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True, cwd=work)
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"\nstart-up, median of {REPEATS}")
    for name, seconds in medians.items():
        print(f"  {name:16} {seconds:6.3f} s")
    if "hf --help" in medians:
        goal("burst at most half of hf", medians["burst --help"] / medians["hf --help"], 0.5, "of hf", less=True)


def check(work: Path, size_gb: float, datasets_python: str | None) -> None:
    path = work / "rows.jsonl"
    rows = generate(path, int(size_gb * 1e9))
    size = path.stat().st_size
    model = train_tokenizer(path, work / "model")
    print(f"\nburst check on {size / 1e6:,.0f} MB, {rows:,} rows of {size / rows:,.0f} bytes")
    parsed = measure([sys.executable, "-c", READ_AND_CHECK, str(path)])
    full = measure([sys.executable, "-c", FULL_CHECK, str(path), str(model)])
    alone = measure([sys.executable, "-c", TOKENIZERS_ALONE, str(path), str(model)])
    print(f"  {'parse and check, one core':32} {size / parsed['s'] / 1e6:8.1f} MB/s  peak {parsed['peak_mb']:6.0f} MB")
    print(
        f"  {'burst check, everything':32} {size / full['s'] / 1e6:8.1f} MB/s  peak {full['peak_mb']:6.0f} MB  "
        f"{full['tokens']:,} tokens"
    )
    print(f"  {'tokenizers alone':32} {size / alone['s'] / 1e6:8.1f} MB/s")
    others = measure([datasets_python or str(training_python()), "-c", DATASETS, str(path), str(model)])
    print(
        f"  {'datasets, load and tokenize':32} {size / others['s'] / 1e6:8.1f} MB/s  peak {others['peak_mb']:6.0f} MB  "
        f"({others['load_s']:.0f} s of {others['s']:.0f} s to load)"
    )
    goal("parsing and checks, one core", size / parsed["s"] / 1e6, 100, "MB/s")
    goal("peak memory of burst check", max(parsed["peak_mb"], full["peak_mb"]), 250, "MB", less=True)
    goal("burst check against tokenizers alone", alone["s"] / full["s"], 0.8, "of its rate")
    print(
        f"  against datasets: {others['s'] / full['s']:.1f} times as fast, {full['peak_mb'] / others['peak_mb']:.2f} of its peak"
    )


def bundle(work: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    import generate as quickstart

    folder = work / "bundle"
    folder.mkdir()
    train, _ = quickstart.rows(466, 0)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    (folder / "burst.yaml").write_text("model: builtin:tiny\ndata: {train: train.jsonl}\n")
    command = [sys.executable, "-m", "burst.cli", "bundle", "-o", "job.tar.gz", "-q"]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    size = (folder / "job.tar.gz").stat().st_size
    print(
        f"\nbundle of 466 pairs ({(folder / 'train.jsonl').stat().st_size / 1000:.0f} KB of data), median of 5: "
        f"{statistics.median(times):.2f} s"
    )
    goal("size", size / 1000, 300, "KB", less=True)


@functools.cache
def training_python() -> Path:
    """The interpreter of the training environment."""
    command = [sys.executable, "-m", "burst.cli", "env", "-q"]
    return Path(subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip())


def measure(command: list[str]) -> dict:
    """A child's own JSON answer and the peak resident memory of it and its children."""
    script = (
        "import json, resource, subprocess, sys\nr = subprocess.run(sys.argv[1:], text=True, stdout=subprocess.PIPE)\n"
        "print(r.stdout.splitlines()[-1])\nprint(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, *command], text=True, stdout=subprocess.PIPE, check=True)
    answer, peak = result.stdout.splitlines()
    return json.loads(answer) | {"peak_mb": int(peak) * 1024 / 1e6}


def goal(name: str, value: float, limit: float, unit: str, less: bool = False) -> None:
    met = value <= limit if less else value >= limit
    print(
        f"  {'met   ' if met else 'MISSED'} {name}: {value:,.2f} {unit} (goal: {'at most' if less else 'at least'} {limit:g})"
    )


def generate(path: Path, size_bytes: int) -> int:
    """Seeded rows of 1 to 4 KB: one of a few system prompts, one to three turns of words from a skewed vocabulary."""
    chance = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chance.choices(letters, weights=range(26, 0, -1), k=chance.randint(2, 10))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    pool = chance.choices(words, weights=weights, k=2_000_000)

    def text(count: int) -> str:
        start = chance.randrange(len(pool) - count)
        return " ".join(pool[start : start + count]).capitalize() + "."

    systems = [text(120) for _ in range(8)]
    rows = written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size_bytes:
            messages = [{"role": "system", "content": chance.choice(systems)}]
            for _ in range(chance.randint(1, 3)):
                messages += [
                    {"role": "user", "content": text(chance.randint(10, 120))},
                    {"role": "assistant", "content": json.dumps({"answer": text(chance.randint(20, 150)), "ok": True})},
                ]
            line = json.dumps({"messages": messages}) + "\n"
            file.write(line)
            written += len(line)
            rows += 1
    return rows


def train_tokenizer(path: Path, folder: Path) -> Path:
    """A byte-level BPE tokenizer with a ChatML template, in a folder that burst takes as a model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    from burst_payload import tiny

    folder.mkdir()
    tiny.write_tokenizer(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sample = []
    with open(path, encoding="utf-8") as file:
        for _, line in zip(range(3000), file, strict=False):
            sample += [message["content"] for message in json.loads(line)["messages"]]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
