"""The bundle alone: what it writes, what it refuses, and what a kill leaves behind. Real training, in its own environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from burst_payload import manifest, seal, tiny
from jobs import MINI_SPEC, burst, change_run, copy_bundle, events, run_payload, write_job

pytestmark = pytest.mark.payload


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, payload_python: str) -> Path:
    """A trained bundle, far away from the checkout, made with no burst in sight."""
    folder = tmp_path_factory.mktemp("made")
    write_job(folder / "job")
    burst("bundle", "-o", str(folder / "job.tar.gz"), cwd=folder / "job")
    bundle = folder / "elsewhere"
    bundle.mkdir()
    subprocess.run(["tar", "-xzf", folder / "job.tar.gz", "-C", bundle], check=True)
    (bundle / "burst_is_not_here.py").write_text("import importlib.util as u\nassert u.find_spec('burst') is None\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run([payload_python, "burst_is_not_here.py"], cwd=bundle, check=True, env=clean)
    result = run_payload(bundle, payload_python)
    assert result.returncode == 0, result.stdout + result.stderr
    return bundle


def test_trains_and_seals_without_burst(made: Path) -> None:
    sealed = seal.verify_seal(made / "out/adapter")
    assert sealed.bundle_id == manifest.verify(made)
    tensors = seal.tensors(made / "out/adapter/adapter_model.safetensors")
    # 4 layers, hidden 128, kv 64, mlp 384, rank 4: q, o 256; k, v 192; gate, up, down 512, each times the rank
    assert sum(t.size_bytes for t in tensors.values()) == 4 * 4 * (2 * 256 + 2 * 192 + 3 * 512) * 4
    metadata = json.loads((made / "out/adapter/metadata.json").read_text())
    assert metadata["steps"] == 2
    assert metadata["adapter"]["trainable_parameters"] == 4 * 4 * (2 * 256 + 2 * 192 + 3 * 512)
    assert metadata["precision"]["reason"] == "CPU: full precision"
    assert [step for step, _ in metadata["losses"]] == [1, 2]
    assert {"verify", "libraries", "prepare", "load", "train"} <= metadata["phases_s"].keys()
    config = json.loads((made / "out/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "builtin:tiny"
    assert config["r"] == 4


def test_events_are_numbered_and_end_with_the_state(made: Path) -> None:
    written = events(made)
    assert [event["seq"] for event in written] == list(range(len(written)))
    kinds = [event["event"] for event in written]
    assert kinds.index("sealed") < kinds.index("probe"), "nothing optional before the adapter is safe"
    assert written[-1] | {"seq": 0, "time": 0} == {
        "seq": 0,
        "time": 0,
        "event": "end",
        "state": "sealed",
        "exit_code": 0,
    }
    status = json.loads((made / "out/status.json").read_text())
    assert (status["state"], status["step"], status["sealed"]) == ("sealed", 2, True)


def test_does_not_train_twice(made: Path, payload_python: str) -> None:
    before = (made / "out/events.jsonl").read_bytes()
    result = run_payload(made, payload_python)
    assert result.returncode == 0
    assert "already sealed" in result.stdout
    assert (made / "out/events.jsonl").read_bytes() == before


def test_the_adapter_loads_into_plain_peft_and_changes_the_model(made: Path, payload_python: str) -> None:
    script = """
import sys, torch
sys.path.insert(0, ".")
from pathlib import Path
from burst_payload import tiny
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = tiny.model_folder(Path("models"))
ids = AutoTokenizer.from_pretrained("out/adapter")("say 1", return_tensors="pt").input_ids
plain = AutoModelForCausalLM.from_pretrained(base)
with torch.no_grad():
    before = plain(ids).logits.clone()
    after = PeftModel.from_pretrained(plain, "out/adapter")(ids).logits
print("differs" if not torch.equal(before, after) else "same")
"""
    result = subprocess.run([payload_python, "-c", script], cwd=made, text=True, capture_output=True, check=False)
    assert result.stdout.strip().endswith("differs"), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda b: (b / "data/train-000.jsonl").write_bytes(b"{}\n"), 4, "data/train-000.jsonl: 3 bytes instead of"),
        (lambda b: (b / "run.json").unlink(), 4, "run.json: missing"),
        (lambda b: change_run(b, "train", typo=1), 2, "unknown key 'typo'"),
        (lambda b: change_run(b, "data", max_length=10), 2, "tokens, more than data.max_length 10"),
        (
            lambda b: change_run(b, "train", scheduler="no_such_scheduler"),
            2,
            "the installed libraries refuse the settings",
        ),
        (lambda b: change_run(b, "adapter", targets=["no_such_layer"]), 2, "no layer is called no_such_layer"),
        (lambda b: change_run(b, "train", learning_rate=1e30), 1, "at step"),
    ],
    ids=["data changed", "run.json gone", "unknown key", "overlong", "bad option", "bad target", "not finite"],
)
def test_refuses_with_the_reason(
    made: Path, tmp_path: Path, payload_python: str, change, code: int, words: str
) -> None:
    bundle = copy_bundle(made, tmp_path / "bundle")
    change(bundle)
    result = run_payload(bundle, payload_python)
    assert result.returncode == code, result.stdout + result.stderr
    assert words in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("do this: ")
    assert not (bundle / "out/adapter").exists()
    assert events(bundle)[-1]["state"] == "failed"


def test_check_stops_before_the_model(made: Path, tmp_path: Path, payload_python: str) -> None:
    bundle = copy_bundle(made, tmp_path / "bundle")
    result = run_payload(bundle, payload_python, "--check")
    assert result.returncode == 0, result.stderr
    assert [event["name"] for event in events(bundle) if event["event"] == "phase"] == [
        "verify",
        "libraries",
        "prepare",
    ]
    assert not (bundle / "out/adapter").exists()


@pytest.mark.parametrize("after", ["libraries", "train", "save"])
def test_kill_and_start_again(made: Path, tmp_path: Path, payload_python: str, after: str) -> None:
    """SIGKILL once a phase was entered: no adapter, or a sealed one; the second start ends well."""
    bundle = copy_bundle(made, tmp_path / "bundle")
    process = subprocess.Popen([payload_python, "-u", "train.py"], cwd=bundle, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"phase: {after}":
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    process.wait()
    adapter = bundle / "out/adapter"
    assert not adapter.exists() or seal.is_sealed(adapter)
    result = run_payload(bundle, payload_python)
    assert result.returncode == 0, result.stderr
    assert seal.is_sealed(adapter)
    assert [event["seq"] for event in events(bundle)] == list(range(len(events(bundle))))
    assert not list((bundle / "out").glob(".adapter.tmp-*"))


@pytest.mark.parametrize("phase", ["libraries", "prepare", "train"])
def test_sigterm_ends_in_order(made: Path, tmp_path: Path, payload_python: str, phase: str) -> None:
    bundle = copy_bundle(made, tmp_path / "bundle")
    process = subprocess.Popen(
        [payload_python, "-u", "train.py"], cwd=bundle, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"phase: {phase}"):
            process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr.strip().splitlines()[-1] == "do this: start it again"
    assert json.loads((bundle / "out/status.json").read_text())["state"] == "interrupted"


def test_an_interruption_that_a_library_swallows_is_not_lost() -> None:
    script = """
import os, signal
from burst_payload import stop
stop.listen()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Exception:
    print("called an error")
except BaseException:
    print("swallowed")
try:
    stop.check()
except stop.Interrupted:
    print("kept", stop.was_asked())
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(manifest.__file__).parents[1])},
        text=True,
        capture_output=True,
    )
    assert result.stdout.split("\n")[:2] == ["swallowed", "kept True"], result.stderr


def test_two_payloads_in_one_folder(made: Path, tmp_path: Path, payload_python: str) -> None:
    bundle = copy_bundle(made, tmp_path / "bundle")
    first = subprocess.Popen([payload_python, "-u", "train.py"], cwd=bundle, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "phase: verify\n"
    second = run_payload(bundle, payload_python)
    assert second.returncode == 1
    assert "another process trains in" in second.stderr
    first.communicate()
    assert first.returncode == 0
    assert seal.is_sealed(bundle / "out/adapter")


def test_a_changed_adapter_is_moved_aside_and_never_lost(made: Path, tmp_path: Path, payload_python: str) -> None:
    bundle = copy_bundle(made, tmp_path / "bundle")
    assert run_payload(bundle, payload_python).returncode == 0
    again = run_payload(bundle, payload_python)
    assert (again.returncode, again.stdout.split(":")[0]) == (0, "already sealed")
    adapter = bundle / "out/adapter"
    with open(adapter / "adapter_config.json", "a") as file:
        file.write(" ")
    assert run_payload(bundle, payload_python).returncode == 0
    assert seal.is_sealed(adapter)
    assert (bundle / "out/adapter.unsealed-1/adapter_model.safetensors").is_file()
    # one that was sealed, and whose process was killed before it got its name
    os.rename(adapter, bundle / "out/.adapter.tmp-1")
    assert run_payload(bundle, payload_python).stdout.startswith("already sealed")
    assert seal.is_sealed(adapter)


SAVE_KILLS = """
import os, shutil, signal, sys
sys.path.insert(0, ".")
from pathlib import Path
import torch
torch.set_num_threads(1)  # forked children must not wait for threads that they do not have
from burst_payload import artifacts, config, manifest, model, precision, seal, tiny
run = config.load(Path("."))
base_folder = tiny.model_folder(Path("models"))
base = model.load_base(base_folder, precision.choose(None, "llama", False), False, False)
targets = model.resolve_targets(base, run.adapter.targets)
adapted = model.attach(base, model.lora_config(run.adapter, targets, 4), 1)
for name, parameter in adapted.named_parameters():
    if "lora_B" in name:
        parameter.data.fill_(0.5)
left = -1
def counted(function):
    def call(*arguments, **keywords):
        global left
        for before in (True, False):  # die before the call, and right after it
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            if before:
                result = function(*arguments, **keywords)
        return result
    return call
for name in ("fsync", "replace", "rename"):
    setattr(os, name, counted(getattr(os, name)))
sealed = absent = 0
for number in range(10_000):
    output = Path(f"kill-{number}")
    output.mkdir()
    child = os.fork()
    if child == 0:
        left = number
        artifacts.save(adapted, base_folder, None, "builtin:tiny", None, {"format": 1}, "b" * 64, output)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if (output / "adapter").exists():
        seal.verify_seal(output / "adapter")
        sealed += 1
    else:
        absent += 1
    shutil.rmtree(output)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
print(f"{number} kills, {absent} absent, {sealed} sealed")
"""


def test_kill_at_every_durable_call_of_a_save(made: Path, tmp_path: Path, payload_python: str) -> None:
    """SIGKILL before and after each fsync, replace and rename: the folder is absent or it verifies."""
    bundle = copy_bundle(made, tmp_path / "bundle")
    (bundle / "kills.py").write_text(SAVE_KILLS)
    result = subprocess.run([payload_python, "kills.py"], cwd=bundle, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    words = result.stdout.split()[-6:]
    kills, absent, sealed = int(words[0]), int(words[2]), int(words[4])
    assert kills >= 20
    assert absent >= 10
    assert sealed >= 2, "at least the undisturbed one, and the one killed after the rename"


def test_a_base_model_whose_template_changed_is_another_model(tmp_path: Path, payload_python: str) -> None:
    model = tmp_path / "job/m"
    model.mkdir(parents=True)
    tiny.write_tokenizer(model)
    path = write_job(tmp_path / "job", spec=MINI_SPEC.replace("builtin:tiny", "./m"))
    burst("bundle", str(path), "-o", str(tmp_path / "bundle"), cwd=tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    result = run_payload(tmp_path / "bundle", payload_python, "--check", "--model", str(model))
    assert result.returncode == 4, result.stderr
    assert "is not the model that the bundle was made for" in result.stderr
