"""A rented machine, through SkyPilot: its life from the launch to the proof that it is gone."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from burst.errors import BurstError
from burst.places import sky_tasks, ssh
from burst.places.local import is_alive
from burst.places.sky_client import client, explained, field
from burst.places.ssh import Scrubbed, Stream
from burst.run import Evidence, Record, Run, State
from burst_payload import records, seal, store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst.places.sky_tasks import Order

PREFIX = "burst-"
"""How the name of every machine of burst's begins."""
SYNC_S = 5.0
DOWN_LIMIT_S = 600.0
_ACTIVE = ("INIT", "PENDING", "SETTING_UP", "RUNNING")


class SkyPilot:
    """Runs bundles on rented machines. Only ``start`` needs an order."""

    def __init__(self, order: Order | None = None) -> None:
        self.order = order
        self._synced = 0.0

    def start(self, run: Run) -> None:
        """Launch the machine and its job. The record names the machine before anything is billed.

        Whatever ends this early (an exception, Ctrl-C) ends the machine too, and sees that it is gone.
        """
        order = self.order
        assert order is not None
        sky = client()
        # Unique, and a folder of its own: on Slurm and on own machines the home folder outlives the machine
        name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:32].rstrip("-")
        cluster = f"{PREFIX}{name}-{uuid.uuid4().hex[:6]}"
        saved = f"{order.cloud.store.rstrip('/')}/{cluster}" if order.cloud.store else None
        task = sky_tasks.train_task(order, _folder(cluster), saved)
        run.update(cluster=cluster, hourly_usd=order.limit.hourly_usd, launched=time.time(), store=saved)
        run.note("launching", cluster=cluster, infra=[offer.infra for offer in order.chosen])
        request = None
        try:
            request = sky.launch(task, cluster_name=cluster)
            run.update(request_id=str(request))
            with self._log(run) as log:
                job, handle = sky.stream_and_get(request, output_stream=log)
            price = float(handle.get_hourly_price())
            run.update(job_id=int(job), hourly_usd=price, state=State.RUNNING)
            run.note(
                "launched", cluster=cluster, job_id=int(job), hourly_usd=price, machine=str(handle.launched_resources)
            )
            _check_price(order, price)
            _check_autodown(order, run, handle)
        except BaseException as error:
            with _undisturbed():  # a second Ctrl-C must not leave a machine behind
                run.note("launch failed", error=type(error).__name__)
                if request is not None:
                    with suppress(Exception):
                        sky.get(sky.api_cancel(request))
                self.down(run)
            if isinstance(error, KeyboardInterrupt):
                run.update(state=State.STOPPED, error="interrupted during the launch", ended=time.time())
                raise
            reason = explained(error)
            run.update(state=State.FAILED, error=reason.what, fix=reason.fix, ended=time.time())
            raise reason from error

    def evidence(self, run: Run) -> Evidence:
        record = run.read()
        alive, status = False, None
        if record.billing:
            try:
                job = self._job_state(run)
                alive = job in _ACTIVE
                status = _said_by(job, run.name)
                if job is None and record.job_id is not None:
                    _see_gone(run)
            except BurstError:  # SkyPilot does not answer: that says nothing about the job
                alive = record.state is State.RUNNING
            if not alive:
                self._synced = 0.0  # what it wrote last counts
            if run.read().billing:
                self.sync(run)
        if not alive and run.sealed() is None:
            _mirror_stored_seal(run)
        return Evidence(
            process_alive=alive,
            launcher_alive=record.launcher is not None and is_alive(record.launcher),
            status=run.status() or status,
            sealed=run.sealed(),
        )

    def stop(self, run: Run) -> None:
        """Cancel the job and wait until it is over; the machine stays, so that what was sealed can be fetched."""
        record = run.read()
        if record.cluster is None or record.gone is not None:
            return
        sky = client()
        with suppress(sky.exceptions.ClusterDoesNotExist, sky.exceptions.ClusterNotUpError):
            sky.get(sky.cancel(record.cluster, all=True))
        deadline = time.monotonic() + 60
        while self._job_state(run) in _ACTIVE and time.monotonic() < deadline:
            time.sleep(1)
        self._synced = 0.0
        self.sync(run)

    def open(self, run: Run, path: str, offset_bytes: int) -> BinaryIO:
        """A file of the run's output folder there, over ssh, from an offset on."""
        file = shlex.quote(f"{_output(run)}/{path}")
        command = f"test -f {file} || exit 44; exec tail -c +{offset_bytes + 1} -- {file}"
        return cast("BinaryIO", Stream(self._ssh(run, command)))

    def extend(self, run: Run) -> None:
        """Start the idle time anew, so that the machine does not go in the middle of a fetch: rsync does not hold it."""
        record = run.read()
        if record.cluster is not None and record.idle_minutes:
            sky = client()
            from sky.skylet.autostop_lib import AutostopWaitFor

            with suppress(Exception):  # no autostop there, or gone: the fetch will say so
                sky.get(sky.autostop(record.cluster, record.idle_minutes, wait_for=AutostopWaitFor.JOBS, down=True))

    def holds_adapter(self, run: Run) -> bool | None:
        """Whether an adapter lies on the machine; None where it cannot be asked, which is no reason to end it."""
        try:
            if self._job_state(run) is None:  # no machine, or one that never had a job
                return False
        except BurstError:
            return None
        answer = self._answer(run, f"test -e {_output(run)}/{seal.ADAPTER_NAME} && echo yes || echo no", 90)
        return {b"yes\n": True, b"no\n": False}.get(answer)

    def down(self, run: Run) -> bool:
        """End the machine and prove that it is gone. Gone already is as good. Returns whether it is gone."""
        record = run.read()
        if record.cluster is None or record.gone is not None:
            return True
        sky = client()
        self._keep_log(run, sky)
        deadline = time.monotonic() + DOWN_LIMIT_S
        while True:
            try:
                sky.get(sky.down(record.cluster))
            except sky.exceptions.ClusterDoesNotExist:
                pass
            except Exception as error:
                run.note("down failed", error=str(error)[:300])
            if _see_gone(run):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(5)

    def _keep_log(self, run: Run, sky: Any) -> None:
        """Append the job's own log to the run's before it dies with the machine."""
        record = run.read()
        with suppress(Exception), self._log(run) as log:
            sky.tail_logs(record.cluster, record.job_id, follow=False, output_stream=log)

    @contextmanager
    def _log(self, run: Run) -> Iterator[Any]:
        """The run's log as a stream that writes no secret down."""
        secrets = self.order.secrets.values() if self.order else []
        with open(run.log, "a", encoding="utf-8", errors="replace") as file:
            yield Scrubbed(file, [value for value in secrets if value])

    def sync(self, run: Run) -> None:
        """Mirror the events, the status and the seal (not the weights) into the run's folder; at most every few seconds.

        A connection that breaks changes nothing: the next call goes on where this one ended.
        """
        if time.monotonic() - self._synced < SYNC_S:
            return
        self._synced = time.monotonic()
        events = run.output / "events.jsonl"
        have = events.stat().st_size if events.exists() else 0
        script = (
            f"cd {_output(run)} 2>/dev/null || exit 0; tail -c +{have + 1} events.jsonl; printf '\\0'; "
            "cat status.json; printf '\\0'; cat adapter/SEALED.json"
        )
        parts = self._answer(run, f"{{ {script}; }} 2>/dev/null", 60).split(b"\0")
        if len(parts) != 3:
            return
        run.output.mkdir(parents=True, exist_ok=True)
        whole = parts[0][: parts[0].rfind(b"\n") + 1]
        with open(events, "ab") as file:
            file.write(whole)
        if parts[1]:
            records.write_atomic(run.output / "status.json", parts[1])
        if parts[2]:
            records.write_atomic(run.output / seal.ADAPTER_NAME / seal.SEAL_NAME, parts[2])

    def _job_state(self, run: Run) -> str | None:
        """The job's state as SkyPilot has it, or None where machine or job are not there."""
        record, sky = run.read(), client()
        try:
            if record.job_id is None and self._launching(record, sky):
                return "PENDING"
            jobs = sky.get(sky.queue(record.cluster))
        except sky.exceptions.ClusterDoesNotExist:
            return None
        except sky.exceptions.ClusterNotUpError as error:
            if record.job_id is None:
                return None
            raise BurstError(f"the machine is not up: {error}", "try again, or see: sky status") from error
        except Exception as error:
            raise explained(error, "SkyPilot does not answer") from error
        states = {int(field(job, "job_id")): field(job, "status") for job in jobs}
        if not states:
            return None
        state = states.get(record.job_id) if record.job_id is not None else states[max(states)]
        return None if state is None else str(getattr(state, "value", state))

    @staticmethod
    def _launching(record: Record, sky: Any) -> bool:
        """Whether SkyPilot's server still works on the launch, which goes on when the launcher dies."""
        if record.request_id is None:
            return False
        requests = sky.api_status(request_ids=[record.request_id])
        return any(
            str(getattr(request.status, "value", request.status)) in ("PENDING", "RUNNING") for request in requests
        )

    def _answer(self, run: Run, command: str, limit_s: float) -> bytes:
        """What a command there prints; nothing where it does not end in time."""
        process = self._ssh(run, command)
        try:
            return process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return b""

    def _ssh(self, run: Run, command: str) -> subprocess.Popen[bytes]:
        record = run.read()
        assert record.cluster is not None
        return subprocess.Popen(
            [*ssh.command(record.cluster), record.cluster, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )


def machines() -> dict[str, str]:
    """The state of every machine that SkyPilot knows, by name, each asked of its provider. Raises ``BurstError``."""
    sky = client()
    try:
        found = sky.get(sky.status(None, refresh=sky.StatusRefreshMode.FORCE))
    except Exception as error:
        raise explained(error, "SkyPilot does not answer") from error
    states = {str(field(item, "name")): field(item, "status") for item in found}
    return {name: str(getattr(state, "value", state)) for name, state in states.items()}


def _see_gone(run: Run) -> bool:
    """Ask the provider, not the cache, whether the machine is there, and record it where it is not."""
    sky, cluster = client(), run.read().cluster
    if sky.get(sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE)):
        return False
    run.update(gone=time.time())
    run.note("machine gone", cluster=cluster)
    return True


def _mirror_stored_seal(run: Run) -> None:
    """The machine went before anybody looked: what it saved is the evidence."""
    url = run.read().store
    if url is None:
        return
    with (
        suppress(store.StoreError, FileNotFoundError),
        store.open_file(url, f"{seal.ADAPTER_NAME}/{seal.SEAL_NAME}", 0) as file,
    ):
        records.write_atomic(run.output / seal.ADAPTER_NAME / seal.SEAL_NAME, file.read())


@contextmanager
def _undisturbed() -> Iterator[None]:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _folder(cluster: str | None) -> str:
    """Where a machine's bundle lies, relative to the home folder there. Names of machines need no quoting."""
    return f"burst/{cluster}"


def _output(run: Run) -> str:
    return f"{_folder(run.read().cluster)}/job/out"


def _said_by(job: str | None, name: str) -> dict[str, Any] | None:
    """What a job's state says of a run whose payload said nothing: its set-up failed, or it was cancelled."""
    if job is None or not job.startswith(("FAILED", "CANCELLED")):
        return None
    what = "the set-up on the machine failed" if job == "FAILED_SETUP" else f"the job ended as {job} before it trained"
    return {"state": "failed", "error": what, "fix": f"burst logs {name}", "exit_code": None}


def _check_price(order: Order, hourly_usd: float) -> None:
    if hourly_usd > order.limit.hourly_usd * 1.001:
        raise BurstError(
            f"the machine costs ${hourly_usd:.2f} an hour, the quote was ${order.limit.hourly_usd:.2f}",
            "it was ended; launch again",
        )


def _check_autodown(order: Order, run: Run, handle: Any) -> None:
    """What was asked for is what is set: read back, since an option that was lost would bill for ever."""
    asked = {offer.infra: offer.autodown for offer in order.chosen}
    launched = handle.launched_resources
    if not asked.get(f"{str(launched.cloud).lower()}/{launched.region}", True):
        return
    sky = client()
    found = sky.get(sky.status([run.read().cluster]))
    if not found or field(found[0], "autostop") < 0 or not field(found[0], "to_down"):
        raise BurstError("the machine did not take its own deletion when idle", "it was ended; launch again")
    run.update(idle_minutes=int(field(found[0], "autostop")))
