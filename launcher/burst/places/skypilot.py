"""A rented machine, through SkyPilot: the only module that imports it, and only once it is used (it takes 2 s)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from burst import paths
from burst.errors import BurstError, NothingFits
from burst.offers import Limits, Offer
from burst.places import ssh
from burst.places.local import is_alive
from burst.places.ssh import Scrubbed, Stream
from burst.run import Evidence, Record, Run, State
from burst_payload import records, seal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from burst.spec import Cloud

SYNC_S = 5.0
DOWN_LIMIT_S = 600.0
_ACTIVE = ("INIT", "PENDING", "SETTING_UP", "RUNNING")


def client() -> Any:
    """SkyPilot's client. Raises ``BurstError`` where it cannot be used."""
    if sys.platform == "win32":
        raise BurstError("SkyPilot does not run on Windows itself", "use WSL")
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    try:
        import sky
    except ImportError as error:
        raise BurstError(f"SkyPilot is not installed ({error})", "pip install 'burst-train[cloud]'") from None
    return sky


def offers(cloud: Cloud) -> list[Offer]:
    """Every machine with a GPU of ``cloud.gpus`` that the user's SkyPilot reaches, one offer a priced region."""
    sky = client()
    from sky.client import sdk
    from sky.clouds import CloudImplementationFeatures
    from sky.utils import resources_utils

    try:
        enabled = {name.lower() for name in sky.get(sdk.enabled_clouds())}
        if not enabled:  # SkyPilot was never asked to look
            sky.get(sdk.check(None, verbose=False))
            enabled = {name.lower() for name in sky.get(sdk.enabled_clouds())}
    except Exception as error:
        raise BurstError(f"SkyPilot does not answer: {error}", "see: sky api status") from error
    if not enabled:
        raise NothingFits("SkyPilot has no place enabled", "set one up with: sky check")
    found = []
    for infra in cloud.infra or sorted(enabled):
        for gpu in cloud.gpus:
            wanted = sky.Resources(infra=infra, accelerators=gpu if ":" in gpu else f"{gpu}:1")
            if str(wanted.cloud).lower() not in enabled:
                continue
            feasible = wanted.cloud.get_feasible_launchable_resources(wanted, num_nodes=1).resources_list
            for launchable in feasible[:1]:
                for resources in resources_utils.make_launchables_for_valid_region_zones(launchable):
                    features = {CloudImplementationFeatures.AUTODOWN}
                    if (
                        str(resources.cloud) == "Slurm"
                    ):  # names only autostop; its autodown does not fire (skypilot#9815)
                        features.add(CloudImplementationFeatures.AUTOSTOP)
                    found.append(
                        Offer(
                            infra=f"{str(resources.cloud).lower()}/{resources.region}",
                            accelerators=",".join(f"{name}:{count}" for name, count in wanted.accelerators.items()),
                            hourly_usd=float(resources.get_cost(3600)),
                            autodown=_supports(resources, features),
                        )
                    )
    return found


def _supports(resources: Any, features: set[Any]) -> bool:
    try:
        resources.cloud.check_features_are_supported(resources, features)
    except Exception:  # NotSupportedError, whose module moved between versions
        return False
    return True


def build_task(
    archive: Path, folder: str, chosen: list[Offer], limit: Limits, python: str | None, secrets: dict[str, str]
) -> Any:
    """``sky/train.yaml`` filled in: paths and limits travel as variables, never as shell text.

    ``folder`` is where the bundle goes, relative to the home folder there.
    """
    sky = client()
    task = sky.Task.from_yaml(str(paths.sky_templates() / "train.yaml"))
    task.set_file_mounts({f"~/{folder}/job.tar.gz": str(archive)})
    task.update_envs(
        {
            "BURST_FOLDER": folder,
            "BURST_PYTHON": python or "",
            "BURST_SETUP_LIMIT_S": str(limit.setup_s),
            "BURST_RUN_LIMIT_S": str(limit.run_s),
        }
    )
    if secrets:
        task.update_secrets(secrets)
    task.set_resources(
        [
            sky.Resources(
                infra=offer.infra,
                accelerators=offer.accelerators,
                autostop={"idle_minutes": limit.idle_minutes, "down": True, "wait_for": "jobs"}
                if offer.autodown
                else None,
            )
            for offer in chosen
        ]
    )
    return task


def hub_secrets() -> dict[str, str]:
    """The user's token for the hub, from the environment or from where the hub keeps it."""
    from huggingface_hub import get_token

    token = get_token()
    return {"HF_TOKEN": token} if token else {}


class SkyPilot:
    """Runs bundles on rented machines. Only ``start`` needs the arguments.

    Args:
        archive: the bundle as one file.
        chosen: the machines that may be launched, in this order; their dearest price is the quote.
        limit: what ends set-up, run and idle machine without us.
        python: an interpreter on the machine that has the training libraries, or None.
        secrets: variables that go through SkyPilot's secrets and into no file of burst.
    """

    def __init__(
        self,
        archive: Path | None = None,
        chosen: list[Offer] | None = None,
        limit: Limits | None = None,
        python: str | None = None,
        secrets: dict[str, str] | None = None,
    ) -> None:
        self.archive = archive
        self.chosen = chosen
        self.limit = limit
        self.python = python
        self.secrets = secrets or {}
        self._synced = 0.0

    def start(self, run: Run) -> None:
        """Launch the machine and its job. The record names the machine before anything is billed.

        Whatever ends this early (an exception, Ctrl-C) ends the machine too, and sees that it is gone.
        """
        assert self.archive is not None
        assert self.chosen is not None
        assert self.limit is not None
        sky = client()
        # Unique, and a folder of its own: on Slurm and on own machines the home folder outlives the machine
        name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:32].rstrip("-")
        cluster = f"burst-{name}-{uuid.uuid4().hex[:6]}"
        task = build_task(self.archive, f"burst/{cluster}", self.chosen, self.limit, self.python, self.secrets)
        run.update(cluster=cluster, hourly_usd=self.limit.hourly_usd, launched=time.time())
        run.note("launching", cluster=cluster, infra=[offer.infra for offer in self.chosen])
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
            self._check_price(price)
            self._check_autodown(run, sky, cluster, handle)
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
            explained = error if isinstance(error, BurstError) else _explained(error)
            run.update(state=State.FAILED, error=explained.what, fix=explained.fix, ended=time.time())
            raise explained from error

    def evidence(self, run: Run) -> Evidence:
        record = run.read()
        alive, status = False, None
        if record.billing:
            try:
                job = self._job_state(run)
                alive = job in _ACTIVE
                status = _said_by(job, run.name)
            except BurstError:  # SkyPilot does not answer: that says nothing about the job
                alive = record.state is State.RUNNING
            if not alive:
                self._synced = 0.0  # what it wrote last counts
            self.sync(run)
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
            if not sky.get(sky.status([record.cluster], refresh=sky.StatusRefreshMode.FORCE)):
                run.update(gone=time.time())
                run.note("machine gone", cluster=record.cluster)
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
        with open(run.log, "a", encoding="utf-8", errors="replace") as file:
            yield Scrubbed(file, [value for value in self.secrets.values() if value])

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
            raise BurstError(f"SkyPilot does not answer: {error}", "see: sky api status") from error
        states = {int(_field(job, "job_id")): _field(job, "status") for job in jobs}
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

    def _check_price(self, hourly_usd: float) -> None:
        assert self.limit is not None
        if hourly_usd > self.limit.hourly_usd * 1.001:
            raise BurstError(
                f"the machine costs ${hourly_usd:.2f} an hour, the quote was ${self.limit.hourly_usd:.2f}",
                "it was ended; launch again",
            )

    def _check_autodown(self, run: Run, sky: Any, cluster: str, handle: Any) -> None:
        """What was asked for is what is set: read back, since an option that was lost would bill for ever."""
        assert self.chosen is not None
        asked = {offer.infra: offer.autodown for offer in self.chosen}
        launched = handle.launched_resources
        if not asked.get(f"{str(launched.cloud).lower()}/{launched.region}", True):
            return
        found = sky.get(sky.status([cluster]))
        if not found or _field(found[0], "autostop") < 0 or not _field(found[0], "to_down"):
            raise BurstError("the machine did not take its own deletion when idle", "it was ended; launch again")
        run.update(idle_minutes=int(_field(found[0], "autostop")))

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


@contextmanager
def _undisturbed() -> Iterator[None]:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _output(run: Run) -> str:
    """The payload's output folder there, relative to the home folder. Names of machines need no quoting."""
    return f"burst/{run.read().cluster}/job/out"


def _said_by(job: str | None, name: str) -> dict[str, Any] | None:
    """What a job's state says of a run whose payload said nothing: its set-up failed, or it was cancelled."""
    if job is None or not job.startswith(("FAILED", "CANCELLED")):
        return None
    what = "the set-up on the machine failed" if job == "FAILED_SETUP" else f"the job ended as {job} before it trained"
    return {"state": "failed", "error": what, "fix": f"burst logs {name}", "exit_code": None}


def _field(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


def _explained(error: BaseException) -> BurstError:
    """SkyPilot's exceptions in one sentence; the run's log has the rest."""
    sky = client()
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, sky.exceptions.ResourcesUnavailableError):
        return NothingFits(f"no machine was to be had: {text}", "allow more GPUs or places in cloud, or try later")
    return BurstError(f"the launch failed: {text}", "the run's log has the rest: burst logs")
