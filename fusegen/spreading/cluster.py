"""A crew that is a Ray cluster: jobs are tasks, each of one processor, those that measure of one GPU besides.

Ray deals out tasks, restarts those whose worker or node died, and gives each task that takes a GPU one that no other
task sees. Which nodes have which GPU it knows by the accelerator type that each node tells, such as H200 or
AMD-Instinct-MI300X-OAM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from fusegen.errors import MissingError, RequestError
from fusegen.spreading.jobs import RETRIES, Answer, Job, fingerprint, opened
from fusegen.spreading.processes import no_pipe_kills
from fusegen.targets import TARGETS, Target

log = logging.getLogger("fusegen.spreading")

INSTALL = "pip install 'fusegen[ray]'"
LOCAL = "local"  # an address: a cluster of this machine alone, which ends with the crew
AUTO = "auto"  # the cluster that this machine is a node of
KNOCK_S = 5.0  # for a host to take a connection
CONNECT_S = 30.0  # for Ray to be joined, which takes 2 s
ALONE_S = 120.0  # how long a cluster may have no node that could do what waits: a node may be on its way back
PREFIX = "accelerator_type:"
Resources = Mapping[str, float]


class Cluster:
    """The Ray cluster at `address`: HOST:PORT of its head as a node of it knows it, `auto` for the one that this
    machine is a node of, ray://HOST:10001 from outside, or `local`.

    `targets`: whose GPUs will be asked for. Raises MissingError without Ray, where the cluster can't be reached within
    a minute, or has none of these GPUs, and RequestError for what is no address.
    """

    def __init__(self, address: str, targets: Sequence[Target] = ()) -> None:
        self.address = address
        self.targets = targets
        self.ray: Any = None
        self.own = False
        self.tasks: dict[Future[Any], tuple[Any, str]] = {}  # Ray's reference to its result, and its name
        self.kinds: dict[str, str | None] = {}  # of the targets' GPUs
        self.lonely_since: float | None = None
        self.piping = no_pipe_kills()

    def __enter__(self) -> Cluster:
        self.ray = ray_package()
        self.piping.__enter__()
        try:
            self.own = not self.ray.is_initialized()
            if self.own:
                connect(self.ray, self.address)
            self.remote = self.ray.remote(performer())
            self.kinds = {target.name: self.accelerator(target) for target in self.targets}
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.own and self.ray.is_initialized():
            self.ray.shutdown()
        self.piping.__exit__(None, None, None)

    # ---------------------------------------------------------------- jobs

    def submit(self, job: Job) -> Future[Any]:
        asked: dict[str, Any] = {"num_cpus": 1, "max_retries": RETRIES, "name": job.name}
        if job.gpu is not None:
            asked["num_gpus"] = 1
            if kind := self.kinds.get(job.gpu.name):
                asked["accelerator_type"] = kind
        ref = self.remote.options(**asked).remote(fingerprint(), pickle.dumps(job), "gpu")
        future: Future[Any] = ref.future()
        self.tasks[future] = ref, job.name
        return future

    def answer(self, future: Future[Any]) -> Answer:
        _, name = self.tasks.pop(future)
        self.lonely_since = None
        try:
            reply = future.result()
        except self.ray.exceptions.LocalRayletDiedError as error:
            raise MissingError(
                f"Ray ended on the node of the cluster at {self.address} that this machine takes part by\n"
                "  all that was done until then is kept; `ray status` shows what became of the others"
            ) from error
        except self.ray.exceptions.RayError as error:
            said = " ".join(str(error).split())[:300]
            return Answer(
                error=MissingError(
                    f"{name} is lost: {type(error).__name__}, {RETRIES} retries included: {said}\n"
                    "  all else is kept; see what kills the workers (memory?), then ask for this one alone"
                )
            )
        return opened(reply)

    def call_off(self, future: Future[Any]) -> None:
        ref, _ = self.tasks.pop(future)
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.cancel(ref, force=True)

    def look(self, waiting: Iterable[Job]) -> None:
        """Raises MissingError where no node could have done any of these for two minutes."""
        nodes = self.nodes()
        if any(any(fits(job, node) for node in nodes) for job in waiting):
            self.lonely_since = None
            return
        self.lonely_since = self.lonely_since or time.monotonic()
        if time.monotonic() - self.lonely_since > ALONE_S:
            raise MissingError(
                f"no node of the Ray cluster at {self.address} could do what is left for {ALONE_S:.0f} s\n"
                f"  its nodes have: {listed(nodes)}\n  all that was done is kept; `ray status` shows what became of it"
            )

    # ---------------------------------------------------------------- GPUs

    def nodes(self) -> list[Resources]:
        """What each node that is alive has."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def accelerator(self, target: Target) -> str | None:
        """The accelerator type of the target's GPUs here; None where any node's GPU may be one, as for an architecture.
        Raises MissingError where no node has one."""
        nodes = [node for node in self.nodes() if node.get("GPU", 0) > 0]
        if any(not accelerators(node) for node in nodes) or (nodes and target.name not in TARGETS):
            return None  # such a node does not tell; whoever measures there looks at the GPU itself
        found = Counter(kind for node in nodes for kind in accelerators(node) if is_model(kind, target.model))
        if not found:
            raise MissingError(
                f"no node of the Ray cluster at {self.address} has a GPU of the model of {target.name}\n"
                f"  its nodes have: {listed(self.nodes())}\n"
                "  start one on a machine that has it: ray start --address=HOST:6379"
            )
        return min(found, key=lambda kind: (-found[kind], kind))


def fits(job: Job, node: Resources) -> bool:
    """Whether a node could do a job, when it is not busy."""
    if job.gpu is None:
        return node.get("CPU", 0) >= 1
    kinds = accelerators(node)
    model = job.gpu.name not in TARGETS or not kinds or any(is_model(kind, job.gpu.model) for kind in kinds)
    return node.get("CPU", 0) >= 1 and node.get("GPU", 0) >= 1 and model


def accelerators(node: Resources) -> list[str]:
    return [name.removeprefix(PREFIX) for name in node if name.startswith(PREFIX)]


def is_model(kind: str, model: str) -> bool:
    """`A100-80G` and `NVIDIA-A100` are of the model `a100`, `AMD-Instinct-MI300X-OAM` is an `mi300x`."""
    return model in re.split(r"[^a-z0-9]+", kind.lower())


def listed(nodes: Iterable[Resources]) -> str:
    """`2 x (8 CPU, 1 GPU H200), 64 CPU`."""
    texts: Counter[str] = Counter()
    for node in nodes:
        kinds = " or ".join(accelerators(node)) or "of no type that it tells"
        gpus = [f"{node['GPU']:g} GPU {kinds}"] if node.get("GPU") else []
        texts[", ".join([f"{node.get('CPU', 0):g} CPU", *gpus])] += 1
    return "; ".join(f"{count} x ({text})" if count > 1 else text for text, count in texts.items()) or "nothing"


def performer() -> Callable[[str, bytes, str], tuple[str, bytes]]:
    """What workers run. It travels as its code, since it has to say so where there is no fusegen like this one."""

    def perform(own: str, job: bytes, on: str) -> tuple[str, bytes]:
        try:
            from fusegen.spreading.jobs import answered
        except ImportError as error:
            import socket as sockets

            return f"{sockets.gethostname()} has none that can be imported ({error}), and {own} asks", b""
        return answered(job, own, on)

    return perform


# ---------------------------------------------------------------- the connection


def ray_package() -> Any:
    """The module `ray`. Raises MissingError."""
    try:
        import ray
    except ImportError as error:
        raise MissingError(f"--ray needs Ray, which is not installed here ({error})\n  {INSTALL}") from error
    return ray


def connect(ray: Any, address: str) -> None:
    """Join the cluster, or start one. Raises MissingError where that does not succeed within half a minute."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for Ray to report this machine to its makers
    asked: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        asked["include_dashboard"] = False
    else:
        if address != AUTO:
            knock(address)
        rehearse(address)
    try:
        ray.init(**asked)
    except (Exception, SystemExit) as error:  # SystemExit is what Ray raises where nobody answers it
        raise MissingError(unreachable(address, " ".join(str(error).split())[:300])) from error


def rehearse(address: str) -> None:
    """Have another process join the cluster first: Ray waits for minutes where something else than Ray answers, or a
    cluster is about to go, and ends its process then. Raises MissingError."""
    code = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=CONNECT_S,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MissingError(unreachable(address, f"Ray there gave no answer within {CONNECT_S:.0f} s")) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"Ray ended with code {done.returncode}"]
        if any("AuthenticationError" in line for line in lines):
            raise MissingError(
                f"the Ray cluster at {address} does not let this machine in: it asks for its token\n"
                "  bring ~/.ray/auth_token of its head here, and set RAY_AUTH_MODE=token here and on every node"
            )
        raise MissingError(unreachable(address, lines[-1][:300]))


def knock(address: str) -> None:
    """See whether anybody is there at all, which Ray takes minutes to find out. Raises MissingError, and RequestError
    for what is no address."""
    where = re.fullmatch(r"(?:ray://)?(?:\[?)([^\s/\]]+?)(?:\]?):(\d{1,5})", address)
    if where is None or not 0 < int(where[2]) < 2**16:
        raise RequestError(
            f"--ray {address} is no address of a Ray cluster\n  write HOST:PORT, as `ray start --head` says it; auto, "
            "on a node of the cluster; ray://HOST:10001 from outside; or local, for this machine alone"
        )
    try:
        socket.create_connection((where[1], int(where[2])), timeout=KNOCK_S).close()
    except OSError as error:
        raise MissingError(unreachable(address, error.strerror or str(error))) from error


def unreachable(address: str, why: str) -> str:
    return (
        f"the Ray cluster at {address} can't be reached: {why}\n"
        "  start it with `ray start --head` on one machine, and `ray start --address=HOST:6379` on the others; "
        "`ray status` shows its nodes"
    )
