"""``burst train``: from a spec to an adapter at home, as plain steps that each leave a durable record."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from burst import bundle, fetch, follow, gpus, models, offers, run
from burst.errors import BurstError, ExitCode, InvalidInput
from burst.follow import Tail, View
from burst.places import sky_tasks
from burst.places.local import Local, is_alive, this_process
from burst.places.skypilot import SkyPilot
from burst.run import Record, Run, State
from burst_payload import records, seal, store

if TYPE_CHECKING:
    from burst.bundle import Bundle
    from burst.interpreter import Interpreter
    from burst.offers import Limits, Offer
    from burst.places import Place
    from burst.spec import Cloud, Spec

POLL_S = 0.2
CLOUD_POLL_S = 3.0
SAFE = "safe here"

Show = Callable[[View], None]


@dataclass(frozen=True)
class Prepared:
    """A run that is recorded and bundled, but not started."""

    run: Run
    bundle: Bundle
    gpu: gpus.Gpu | None


def resolve_where(where: str, spec: Spec) -> str:
    """The place of a run: ``auto`` means local until there is a plan. Raises ``InvalidInput`` for what cannot go there."""
    if where != "cloud":
        return "local"
    if spec.model_kind == "local":
        raise InvalidInput(
            "a local model does not travel to a rented machine", "name a model of the hub, or builtin:tiny"
        )
    return "cloud"


def twin(bundle_id: str) -> tuple[Run, Record] | None:
    """An earlier run of exactly the same bundle that has its adapter or is still at work."""
    for earlier, record in reversed(readable_runs()[0]):
        if record.bundle_id == bundle_id and record.state in (State.RUNNING, State.SEALED, State.ADOPTED):
            return earlier, record
    return None


def about_twin(earlier: Run, record: Record) -> tuple[str, str]:
    """What to say of an equal job, and what to do."""
    again = "train it again with --again"
    if record.state is State.RUNNING:
        return f"this very job is running as {earlier.name}", f"watch it with: burst logs -f {earlier.name}; or {again}"
    if record.state is State.ADOPTED and adapter_state(record) == SAFE:
        return f"this very job was trained already: run {earlier.name}, adapter in {record.destination}", again
    return f"this very job was trained already: run {earlier.name}", f"burst fetch {earlier.name}; or {again}"


def only_running() -> Run | None:
    """The one run that is at work. Raises ``InvalidInput`` where there are several."""
    running = [item for item, record in readable_runs()[0] if not record.state.over]
    if len(running) > 1:
        raise InvalidInput(
            f"these runs are at work: {', '.join(item.name for item in running)}", "name the one to stop"
        )
    return running[0] if running else None


def readable_runs() -> tuple[list[tuple[Run, Record]], list[BurstError]]:
    """Every run with its settled record, oldest first, and what is wrong with the records that cannot be read."""
    found: list[tuple[Run, Record]] = []
    damaged: list[BurstError] = []
    for item in run.all_runs():
        try:
            found.append((item, refresh(item)))
        except BurstError as error:
            damaged.append(error)
    return found, damaged


def prepare(
    spec: Spec, spec_path: Path, name: str, destination: Path, *, where: str = "local", allow_secrets: bool
) -> Prepared:
    """Record the run, then make its bundle. A failure leaves a failed run with the reason in its record."""
    fetch.check_destination(destination)
    gpu = gpus.choose(gpus.detect(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    new = run.create(name, where=where, model=spec.model, destination=destination, launcher=this_process())
    try:
        shutil.copyfile(spec_path, new.folder / run.SPEC_NAME)
        made = bundle.build(spec, spec_path.parent, new.bundle, allow_secrets=allow_secrets)
        new.update(bundle_id=made.bundle_id)
        new.note("bundled", bundle_id=made.bundle_id, size_bytes=made.size_bytes)
    except InvalidInput:
        shutil.rmtree(new.folder)  # nothing was started and the input is at fault: that is no run
        raise
    except BaseException as error:
        what = error.what if isinstance(error, BurstError) else f"{type(error).__name__}: {error}"
        new.update(state=State.FAILED, error=what, ended=time.time())
        raise
    return Prepared(new, made, gpu)


def discard(prepared: Prepared) -> None:
    """Forget a run that was prepared but never started."""
    shutil.rmtree(prepared.run.folder)


def start(prepared: Prepared, spec: Spec, spec_folder: Path, python: Interpreter) -> Local:
    """Start the bundle on this machine."""
    local_model = models.resolve(spec, spec_folder).folder if spec.model_kind == "local" else None
    place = Local(python.path, local_model, prepared.gpu.uuid if prepared.gpu else None)
    place.start(prepared.run)
    prepared.run.refresh(place.evidence(prepared.run))
    return place


def quote(
    cloud: Cloud, max_cost_usd: float | None, max_hours: float | None, *, exports: bool = False
) -> tuple[list[Offer], Limits]:
    """The machines that may be launched, cheapest first, and the limits that hold.

    Raises ``NothingFits``, and ``InvalidInput`` for a secret that is not set or a store that cannot be written.
    """
    sky_tasks.secrets(cloud, hub=False)
    if cloud.store is not None:
        try:
            store.check_writable(cloud.store)
        except store.StoreError as error:
            raise InvalidInput(f"cloud.store: {error}", "look at its name and at your access to it") from None
    chosen = offers.chosen(sky_tasks.offers(cloud), without_autodown=cloud.without_autodown)
    return chosen, offers.limits(
        chosen,
        cloud.max_cost_usd if max_cost_usd is None else max_cost_usd,
        cloud.max_hours if max_hours is None else max_hours,
        exports=exports,
        stores=cloud.store is not None,
    )


def start_cloud(prepared: Prepared, spec: Spec, chosen: list[Offer], limit: Limits) -> SkyPilot:
    """Start the bundle on a rented machine. Returns when its job was submitted."""
    secrets = sky_tasks.secrets(spec.cloud, hub=spec.model_kind == "hub")
    archive = prepared.run.folder / "job.tar.gz"
    records.write_atomic(archive, bundle.archive(prepared.run.bundle))
    place = SkyPilot(sky_tasks.Order(archive, chosen, limit, spec.cloud, secrets))
    place.start(prepared.run)
    return place


def place_of(record: Record) -> Place:
    """The place of a run, for any later process."""
    return SkyPilot() if record.where == "cloud" else Local()


def watch(a_run: Run, place: Place, show: Show) -> Record:
    """Follow a run until its process is over. ``show`` gets a view whenever there is news, and at least every second."""
    tail, view = Tail(a_run.output / "events.jsonl"), View()
    shown = 0.0
    while True:
        record = a_run.refresh(place.evidence(a_run))
        news = False
        for event in tail.poll():
            view, news = follow.fold(view, event), True
        if news or time.monotonic() - shown > 1.0:
            show(view)
            shown = time.monotonic()
        if record.state.over:
            return record
        time.sleep(POLL_S if record.where == "local" else CLOUD_POLL_S)


def adopt(
    a_run: Run, place: Place, destination: Path | None, progress: Callable[[int], None] | None = None
) -> fetch.Fetched:
    """Fetch a run's adapter and record where it is. Raises ``BurstError`` where there is none."""
    record = refresh(a_run, place)
    home = destination or Path(record.destination)
    if record.state in (State.FAILED, State.STOPPED) and a_run.sealed() is None:
        raise BurstError(
            f"run {a_run.name} has no adapter: {record.error or record.state.value}",
            f"look at it with: burst show {a_run.name}",
        )
    if record.state in (State.CREATED, State.RUNNING) and a_run.sealed() is None:
        raise BurstError(f"run {a_run.name} has no sealed adapter yet", f"watch it with: burst logs -f {a_run.name}")
    if destination is None and not home.parent.parent.is_dir():
        raise BurstError(f"{home.parent.parent} is gone", f"say where to: burst fetch {a_run.name} -o FOLDER")
    if isinstance(place, SkyPilot):
        place.extend(a_run)
    try:
        fetched = fetch.fetch(_source(a_run, place), home, bundle_id=record.bundle_id, progress=progress)
    except InvalidInput as error:
        raise InvalidInput(error.what, f"say where to: burst fetch {a_run.name} -o FOLDER") from None
    still_running = record.state is State.RUNNING  # the probes after training: the adapter is whole already
    a_run.note("adopted", path=str(fetched.folder), seal_id=fetched.seal.seal_id, pulled_bytes=fetched.pulled_bytes)
    if not still_running:
        a_run.update(state=State.ADOPTED, seal_id=fetched.seal.seal_id, destination=str(fetched.folder))
    return fetched


def _source(a_run: Run, place: Place) -> fetch.OpenFile:
    """Where a run's files come from: where it ran, or its store once the machine is gone."""
    record = a_run.read()
    if (url := record.store) is None or record.gone is None:
        return lambda path, offset: place.open(a_run, path, offset)

    def open_stored(path: str, offset: int) -> BinaryIO:
        try:
            return store.open_file(url, path, offset)
        except store.StoreError as error:
            raise BurstError(str(error), "try again, or look at your access to it") from error

    return open_stored


def stop(a_run: Run) -> Record:
    """End a run's process and settle its record."""
    place = place_of(a_run.read())
    if not refresh(a_run, place).state.over:
        a_run.update(stop_asked=time.time())
        a_run.note("stopping")
        place.stop(a_run)
    return refresh(a_run, place)


def refresh(a_run: Run, place: Place | None = None) -> Record:
    """The record of a run, settled by what can be seen now; without a place, of a rented one as it was last seen."""
    if place is None and a_run.read().where == "cloud":
        return a_run.read()
    return a_run.refresh((place or Local()).evidence(a_run))


def down(a_run: Run, *, force: bool = False) -> Record:
    """End a run's rented machine, prove that it is gone, and settle the record.

    Raises ``BurstError`` where it is still there, and, without ``force``, where an adapter may lie on it that is not here.
    """
    place = SkyPilot()
    record = refresh(a_run, place)
    if not force and record.billing and adapter_state(record) != SAFE and place.holds_adapter(a_run) is not False:
        raise BurstError(
            f"the machine {record.cluster} holds an adapter that is not here, or cannot be asked",
            f"burst fetch {a_run.name}; to end it all the same: burst down {a_run.name} --force",
        )
    if not place.down(a_run):
        raise BurstError(
            f"the machine {a_run.read().cluster} is still there",
            f"burst down {a_run.name}; or in the provider's console",
        )
    return refresh(a_run, place)


def forgotten(record: Record) -> bool:
    """Whether a rented machine may be up that nobody looks after: its launcher has ended, and so has the run, or it never began."""
    if not record.billing or (record.launcher is not None and is_alive(record.launcher)):
        return False
    return record.state.over or record.state is State.CREATED


def cost_usd(record: Record) -> float | None:
    """What a run's machine has cost so far, by its own clock and price; None for a run on this machine."""
    if record.hourly_usd is None or record.launched is None:
        return None
    return offers.cost_usd(record.hourly_usd, record.launched, record.gone or time.time())


def adapter_state(record: Record) -> str:
    """Where the adapter is, in one phrase: it is the question people have first."""
    if record.state is State.ADOPTED:
        home = Path(record.destination)
        try:
            there = seal.read_seal(home)
        except (seal.SealError, OSError):
            return "moved or removed"
        # sizes only: hashing gigabytes is for burst fetch
        whole = all((home / e.path).is_file() and (home / e.path).stat().st_size == e.size_bytes for e in there.files)
        return SAFE if whole and there.seal_id == record.seal_id else "changed here"
    if record.seal_id is None:
        return "none"
    if record.cluster is None:
        return "sealed, not fetched"
    if record.gone is None:
        return "only on the machine"
    return "in the store" if record.store is not None else "lost"


def exit_code(record: Record) -> ExitCode:
    """How ``burst train`` ends for a run that ended like this."""
    if record.state in (State.SEALED, State.ADOPTED):
        return ExitCode.OK
    if record.state is State.STOPPED:
        return ExitCode.INTERRUPTED
    return ExitCode(record.exit_code) if record.exit_code in set(ExitCode) else ExitCode.FAILED
