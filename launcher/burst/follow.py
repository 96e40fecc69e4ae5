"""A run's event log as a view: what to show is computed here, how it looks is decided in ``screens``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from burst_payload.records import parse_event

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Probe:
    asked: str
    expected: str
    before: str
    after: str


@dataclass(frozen=True)
class View:
    """The newest state of a run, folded from its events. ``losses`` are (step, loss)."""

    phase: str = "starting"
    step: int = 0
    steps: int = 0
    losses: tuple[tuple[int, float], ...] = ()
    eval_losses: tuple[tuple[int, float], ...] = ()
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    eta_s: float | None = None
    device: str | None = None
    precision: str | None = None
    trainable_parameters: int | None = None
    rows: int | None = None
    tokens: int | None = None
    notes: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    resumed_step: int = 0
    """The step of the checkpoint that this segment began at."""
    sealed: bool = False
    state: str = "running"
    error: str | None = None
    fix: str | None = None
    training_since: float | None = field(default=None, compare=False)


def fold(view: View, event: dict[str, Any]) -> View:
    """The view after one event; an event of an unknown kind changes nothing."""
    kind = event["event"]
    if kind == "phase":
        since = event["time"] if event.get("name") == "train" else view.training_since
        fresh = view
        if event.get("name") == "verify":  # a payload that was started again; it says which step it goes on from
            fresh = View(notes=view.notes, losses=view.losses, eval_losses=view.eval_losses)
        elif event.get("name") == "load" and not view.resumed_step:
            fresh = replace(view, losses=(), eval_losses=())
        return replace(fresh, phase=str(event.get("name")), training_since=since)
    if kind == "resume":
        at = int(event["step"])
        losses = tuple(item for item in view.losses if item[0] <= at)
        eval_losses = tuple(item for item in view.eval_losses if item[0] <= at)
        return replace(view, resumed_step=at, step=at, losses=losses, eval_losses=eval_losses)
    if kind == "plan":
        return replace(view, steps=int(event["steps"]))
    if kind == "data":
        return replace(view, rows=event.get("rows"), tokens=event.get("tokens"), steps=int(event.get("steps") or 0))
    if kind == "precision":
        return replace(view, precision=f"{event.get('compute')} ({event.get('reason')})")
    if kind == "model":
        return replace(view, device=event.get("device"), trainable_parameters=event.get("trainable_parameters"))
    if kind == "step":
        return _step(view, event)
    if kind == "eval" and event.get("loss") is not None:
        return replace(view, eval_losses=(*view.eval_losses, (int(event["step"]), float(event["loss"]))))
    if kind == "note":
        return replace(view, notes=(*view.notes, str(event.get("text"))))
    if kind == "probe":
        probe = Probe(*(str(event.get(key, "")) for key in ("asked", "expected", "before", "after")))
        return replace(view, probes=(*view.probes, probe))
    if kind == "sealed":
        return replace(view, sealed=True)
    if kind == "end":
        return replace(view, state=str(event.get("state")), error=event.get("error"), fix=event.get("fix"), eta_s=None)
    return view


def _step(view: View, event: dict[str, Any]) -> View:
    step, steps = int(event["step"]), int(event["steps"])
    eta = None
    if view.training_since is not None and step > view.resumed_step:
        eta = (event["time"] - view.training_since) / (step - view.resumed_step) * (steps - step)
    losses = view.losses if event.get("loss") is None else (*view.losses, (step, float(event["loss"])))
    return replace(
        view,
        step=step,
        steps=steps,
        losses=losses,
        eta_s=eta,
        tokens_per_s=event.get("tokens_per_s") or view.tokens_per_s,
        memory_bytes=event.get("memory_bytes"),
    )


def to_json(view: View) -> dict[str, Any]:
    """The view as plain values, for ``burst show --json``."""
    value = asdict(view)
    value.pop("training_since")
    return value


class Tail:
    """New complete events of a growing log, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def poll(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = parse_event(line)
            if event is not None:
                yield event


def replay(path: Path) -> View:
    """The view of a log as it is now."""
    view = View()
    for event in Tail(path).poll():
        view = fold(view, event)
    return view
