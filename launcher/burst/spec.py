"""``burst.yaml``: what the user wants, validated strictly.

Every problem of the file is reported at once, with its line; an unknown key names the nearest known one. Nothing has
two meanings: what a key does not say is in its default, and ``docs/spec.md`` is generated from this module.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from burst.errors import InvalidInput
from burst_payload.measures import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULT_NAME = "burst.yaml"
BUILTIN_MODEL = "builtin:tiny"
DEFAULT_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADVICE = "every key with its default is in docs/spec.md; editors take: burst schema"
NICKNAMES = {
    "lr": "learning_rate",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "batch_size": "batch",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_seq_length": "max_length",
    "base_model": "model",
}
"""What other tools call a key."""
LARGEST = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Source(Section):
    """One training file."""

    path: str = Field(description="JSONL file, relative to the spec")
    repeat: PositiveInt = Field(1, description="how many times each row is seen per epoch, exactly")


class Data(Section):
    """The rows."""

    train: str | None = Field(None, description="JSONL file to train on, relative to the spec")
    sources: list[Source] | None = Field(
        None, description="several training files instead of `train`, each with a repeat"
    )
    eval: str | None = Field(None, description="JSONL file to evaluate on")
    eval_split: float | None = Field(
        None, gt=0, le=0.5, description="without `eval`: the share of rows held out, chosen by `train.seed` and content"
    )
    format: Literal["auto", "messages", "conversations", "prompt_completion", "instruction", "text"] = Field(
        "auto", description="row format; auto reads it from the first row"
    )
    max_length: int = Field(2048, ge=8, le=LARGEST, description="tokens a row may have")
    on_overlong: Literal["refuse", "drop", "truncate"] = Field(
        "refuse", description="what happens to longer rows; the last two are counted and said"
    )
    score: Literal["all", "last"] = Field("all", description="which assistant turns are learned")
    chat_template: str = Field(
        "model", description="`model`: the model's own; `none`: raw text; else a .jinja file, relative to the spec"
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="variables for the template, such as enable_thinking"
    )

    @model_validator(mode="after")
    def _one_way_to_name_files(self) -> Data:
        if (self.train is None) == (self.sources is None):
            raise ValueError("give either train or sources")
        if self.sources is not None and not self.sources:
            raise ValueError("sources is empty")
        if self.eval is not None and self.eval_split is not None:
            raise ValueError("give either eval or eval_split")
        return self

    @property
    def training_sources(self) -> list[Source]:
        return self.sources if self.sources is not None else [Source(path=self.train or "", repeat=1)]


class Adapter(Section):
    """The LoRA adapter."""

    rank: PositiveInt = Field(16, description="rank of each LoRA pair")
    alpha: float | None = Field(None, gt=0, description="scale is alpha / rank; default 2 x rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input")
    targets: list[str] = Field(
        default_factory=lambda: list(DEFAULT_TARGETS),
        min_length=1,
        description="linear layers that get an adapter, by name; `[all-linear]` is all of them",
    )
    last_layers: PositiveInt | None = Field(None, description="only the last N layers")
    rslora: bool = Field(False, description="scale by alpha / sqrt(rank)")
    dora: bool = Field(False, description="weight-decomposed LoRA")

    @field_validator("targets", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class Train(Section):
    """The training loop."""

    epochs: float | None = Field(None, gt=0, description="passes over the data; default 3")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps instead of epochs")
    batch: PositiveInt = Field(1, description="rows on the device at a time")
    effective_batch: PositiveInt = Field(8, description="rows per optimizer step; a multiple of batch")
    learning_rate: float = Field(2e-4, gt=0, description="peak learning rate")
    scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "cosine", description="learning rate over time"
    )
    warmup_steps: int = Field(5, ge=0, le=LARGEST, description="steps from zero to the peak")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this norm; 0 is off")
    optimizer: Literal["auto", "adamw_torch", "adamw_8bit", "paged_adamw_8bit"] = Field(
        "auto", description="auto: paged 8-bit AdamW on a GPU, AdamW on a CPU"
    )
    seed: int = Field(3407, ge=0, lt=2**32, description="seed of initial weights, order and split")
    logging_steps: PositiveInt = Field(1, description="steps between loss lines")
    eval_steps: PositiveInt | None = Field(None, description="steps between evaluations; default: once at the end")
    save_steps: PositiveInt | None = Field(None, description="steps between checkpoints; default: none")
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto", description="recompute activations instead of keeping them; auto: on a GPU"
    )
    measures: list[str] | None = Field(
        None, description="memory and speed measures by name (docs/measures.md); default: the exact ones that pay"
    )

    @field_validator("measures", mode="before")
    @classmethod
    def _known_measures(cls, value: Any) -> Any:
        if value == "auto":
            return None
        unknown = [name for name in value if name not in table.NAMES] if isinstance(value, list) else []
        if unknown:
            raise ValueError(f"no measure is called {unknown[0]!r}; there are: {', '.join(table.NAMES)}")
        return value

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _true_is_on(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> Train:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("give either epochs or max_steps")
        if self.effective_batch % self.batch:
            raise ValueError(f"effective_batch {self.effective_batch} is not a multiple of batch {self.batch}")
        return self


class Probes(Section):
    """Held-out rows that are answered before and after training, to see what changed."""

    rows: int = Field(3, ge=0, le=LARGEST, description="how many rows, from the start of the evaluation data; 0 is off")
    max_new_tokens: PositiveInt = Field(128, description="longest answer")


class Cloud(Section):
    """Where and how much, on rented machines."""

    gpus: list[str] = Field(
        default_factory=lambda: ["A100", "A100-80GB", "H100"],
        min_length=1,
        description="acceptable GPUs, by SkyPilot's names; `A100:4` is four of them that share each step",
    )
    infra: list[str] | None = Field(
        None,
        description="acceptable places, such as `aws`, `lambda/us-east-1`, `slurm/mycluster`; default: all that are enabled",
    )
    python: str | None = Field(
        None, description="interpreter on the machine that has the training libraries; default: an environment is made"
    )
    store: str | None = Field(
        None,
        pattern=r"^(s3|gs|r2|hf|file)://[^/].*|^file:///.+",
        description="where the machine saves the sealed adapter by itself, such as `s3://bucket/folder`; `file://` is a "
        "folder that outlives the machine",
    )
    secrets: list[str] = Field(
        default_factory=list,
        description="environment variables of this computer that the run gets, such as `WANDB_API_KEY`; they are written nowhere",
    )
    without_autodown: bool = Field(
        False, description="also take places where an idle machine cannot delete itself, such as Slurm"
    )
    prices: dict[str, float] = Field(
        default_factory=dict,
        description="dollars an hour of your own machines, by `place:GPU`, such as `slurm/lab:A100`",
    )
    max_cost_usd: float | None = Field(None, gt=0, description="hard limit of one run")
    max_hours: float | None = Field(None, gt=0, description="hard limit of one run")

    @field_validator("gpus")
    @classmethod
    def _one_count(cls, value: list[str]) -> list[str]:
        odd = [gpu for gpu in value if not re.fullmatch(r"[^:]+(:[1-9]\d{0,2})?", gpu)]
        if odd:
            raise ValueError(f"{odd[0]!r} is not a GPU's name, or a name and how many, such as A100:4")
        if len({gpu.partition(":")[2] or "1" for gpu in value}) > 1:
            raise ValueError("give the same number of each GPU: the rows of a step are shared among them")
        return value

    @property
    def count(self) -> int:
        """How many GPUs a machine has."""
        return int(self.gpus[0].partition(":")[2] or 1)


class Choice(Section):
    """How ``where: auto`` chooses."""

    prefer: Literal["auto", "local", "cloud", "cheap", "fast"] = Field(
        "auto", description="auto: this machine when it can do it and is not unreasonably slower; else the cheapest"
    )
    deadline_hours: float | None = Field(None, gt=0, description="what is expected to take longer is not taken")
    slower_by: float = Field(
        10.0, ge=1, description="how many times slower than a rented card this machine may be, past the first hour"
    )


class Spec(Section):
    """One training job."""

    model: str = Field(
        min_length=1, description="hub id, local folder (starting with `.`, `~` or `/`), or `builtin:tiny`"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model; recorded as a commit")
    data: Data = Field(description="the rows")
    adapter: Adapter = Field(default_factory=Adapter, description="the LoRA adapter")
    quantization: Literal["nf4", "none"] = Field("nf4", description="4-bit base weights on a GPU, or 16-bit")
    train: Train = Field(default_factory=Train, description="the training loop")
    probes: Probes = Field(default_factory=Probes, description="answers before and after")
    where: Literal["auto", "local", "cloud"] = Field("auto", description="where to run")
    plan: Choice = Field(default_factory=Choice, description="how auto chooses")
    cloud: Cloud = Field(default_factory=Cloud, description="rented machines")
    export: list[str] = Field(default_factory=list, description="formats to make after the adapter is safe")

    @model_validator(mode="after")
    def _batch_can_be_shared(self) -> Spec:
        together = self.train.batch * self.cloud.count
        if self.train.effective_batch % together:
            raise ValueError(
                f"train.effective_batch {self.train.effective_batch} cannot be shared by {self.cloud.count} GPUs with "
                f"batches of {self.train.batch}: make it a multiple of {together}"
            )
        return self

    @field_validator("export", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("model")
    @classmethod
    def _known_builtin(cls, value: str) -> str:
        if value.startswith("builtin:") and value != BUILTIN_MODEL:
            raise ValueError(f"the only built-in model is {BUILTIN_MODEL}")
        return value

    @property
    def model_kind(self) -> Literal["hub", "local", "builtin"]:
        if self.model == BUILTIN_MODEL:
            return "builtin"
        return "local" if self.model.startswith((".", "~", "/")) else "hub"


def load(path: Path) -> Spec:
    """Read and validate a spec file. Raises ``InvalidInput`` with every problem, each as ``file:line: what``."""
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet"):
        raise InvalidInput(f"{path} is data, not a spec", f"make a spec for it with: burst init {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist", "make one with: burst init DATA.jsonl") from None
    except IsADirectoryError:
        raise InvalidInput(f"{path} is a folder", f"give the file, for example {path / DEFAULT_NAME}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Spec:
    """Validate the text of a spec; ``name`` is how errors call the file. Raises ``InvalidInput``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        value = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = (error.problem or "not YAML").split("\n")[0]
        raise InvalidInput(f"{name}{line}: {problem}", "write each key once, as `key: value` on its own line") from None
    except (YAMLError, ValueError) as error:
        raise InvalidInput(f"{name}: not YAML: {str(error).splitlines()[0]}", "write one `key: value` a line") from None
    if not isinstance(value, CommentedMap):
        raise InvalidInput(f"{name}: a spec is a mapping of keys to values", ADVICE)
    return from_values(_plain(value), name, value)


def from_values(values: dict[str, Any], name: str, marked: Any = None) -> Spec:
    """Validate plain values; ``marked`` is where they stood in a file. Raises ``InvalidInput``."""
    try:
        return Spec.model_validate(values)
    except ValidationError as error:
        lines = [f"{name}{_line(marked, item['loc'])}: {_sentence(item)}" for item in error.errors()]
        raise InvalidInput("\n".join(lines), ADVICE) from None


def schema() -> dict[str, Any]:
    """The JSON Schema of a spec, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Every section with its dotted name, the whole spec first (as ``""``)."""
    yield "", Spec
    yield from (
        ("data", Data),
        ("data.sources[]", Source),
        ("adapter", Adapter),
        ("train", Train),
        ("probes", Probes),
        ("plan", Choice),
        ("cloud", Cloud),
    )


def _plain(value: Any) -> Any:
    """Ruamel's round-trip containers and scalars as plain Python values."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _line(root: Any, location: tuple[int | str, ...]) -> str:
    """``:LINE`` of the deepest part of a location that stands in the file."""
    line: int | None = None
    node = root
    for part in location:
        try:
            line = (node.lc.key(part) if isinstance(part, str) else node.lc.item(part))[0]
            node = node[part]
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return "" if line is None else f":{line + 1}"


def _sentence(item: Any) -> str:
    """One pydantic error as a sentence for people."""
    location = [str(part) for part in item["loc"]]
    path = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = list(_fields_at(item["loc"][:-1]))
        alias = NICKNAMES.get(location[-1])
        nearest = [alias] if alias in known else difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys here: {', '.join(known)}"
        return f"unknown key {path!r}; {hint}"
    if item["type"] == "missing":
        return f"missing key {path!r}"
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path}: must be a mapping of keys, not {item['input']!r}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{path}: {message[0].lower()}{message[1:]}" if path else message


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    name = ".".join(str(part) for part in location if isinstance(part, str))
    for dotted, model in sections():
        if dotted.removesuffix("[]") == name:
            return list(model.model_fields)
    return []
