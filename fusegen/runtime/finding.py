"""What is here to run kernels on: the GPUs of this machine, and the device for a target.

present()                 the GPUs of this machine, and why a vendor has none
find(target, on="auto")   the device that runs that target's kernels here
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from fusegen.errors import FusegenError, MissingError, RequestError
from fusegen.runtime.devices import Device, Gpu, runs
from fusegen.targets import TARGETS, Target


@dataclass(frozen=True, slots=True)
class Present:
    """The GPUs of this machine; `missing` says for each vendor without one why."""

    gpus: tuple[Gpu, ...]
    missing: Mapping[str, str]


VENDORS: Mapping[str, str] = {"cuda": "nvidia", "hip": "amd"}  # and the module of its driver


def gpus_of(vendor: str) -> tuple[Gpu, ...]:
    """One vendor's GPUs. Raises MissingError where its driver is missing or sees none."""
    found: tuple[Gpu, ...] = import_module(f"fusegen.runtime.{VENDORS[vendor]}").list_gpus()
    return found


def present() -> Present:
    """Ask each vendor's driver for its GPUs. Never raises: a vendor that has none has its reason in `missing`."""
    gpus: list[Gpu] = []
    missing: dict[str, str] = {}
    for vendor in VENDORS:
        try:
            gpus += gpus_of(vendor)
        except FusegenError as error:
            missing[vendor] = str(error)
    return Present(tuple(gpus), missing)


def target_here() -> Target | None:
    """The target of this machine's first GPU that has one. A vendor is asked only where those before it have none."""
    for vendor in VENDORS:
        try:
            gpus = gpus_of(vendor)
        except FusegenError:
            continue
        for gpu in gpus:
            if (found := target_of(gpu)) is not None:
                return found
    return None


def matching(target: Target) -> tuple[Gpu, ...]:
    """The GPUs of this machine that can run kernels compiled for `target`; none where the driver is missing."""
    try:
        gpus = gpus_of(target.vendor)
    except FusegenError:
        return ()
    return tuple(gpu for gpu in gpus if runs(target.arch, gpu.vendor, gpu.arch))


def target_of(gpu: Gpu) -> Target | None:
    """The target whose facts fit `gpu` best: its own model, else one whose code it runs; None when there is none."""
    fitting = [t for t in TARGETS.values() if t.vendor == gpu.vendor and runs(t.arch, gpu.vendor, gpu.arch)]
    words = re.sub(r"[^a-z0-9]+", " ", gpu.name.lower()).split()
    spans = {
        "".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)
    }  # of "RX 7900 XTX" too
    own = [target for target in fitting if target.model in spans]
    return next(iter([*own, *sorted(fitting, key=lambda target: abs(target.sms - gpu.sms))]), None)


def find(target: Target, on: str = "auto", *, check: bool | None = None) -> Device:
    """The device that runs `target`'s kernels.

    on="auto": a matching GPU, else the emulator; "gpu" or "gpu:1": that GPU; "emulator": the emulator, which looks for
    races and stray accesses when `check` (None: where there is a compiler for that build; the device's name says when
    there is none). Raises MissingError when a GPU is asked for and no such GPU is here, and RequestError for another
    `on`.
    """
    where = re.fullmatch(r"auto|emulator|gpu(?::(\d+))?", str(on))
    if where is None:
        raise RequestError(f"{on!r} names no device; say auto, gpu, gpu:1 (by number) or emulator")
    gpus = () if on == "emulator" else matching(target)
    chosen = [gpu for gpu in gpus if where[1] is None or gpu.ordinal == int(where[1])]
    if chosen:
        return gpu_device(target, chosen[0].ordinal)
    if on in ("auto", "emulator"):
        from fusegen.emulator.toolchain import can_check
        from fusegen.runtime.emulated import EmulatorDevice

        return EmulatorDevice(target, check=can_check() if check is None else check)
    raise MissingError(no_gpu(target, on))


def gpu_device(target: Target, ordinal: int) -> Device:
    device: Device = import_module(f"fusegen.runtime.{VENDORS[target.vendor]}").device(ordinal)
    return device


def no_gpu(target: Target, on: str) -> str:
    """Why there is no GPU for `target`, and what to do."""
    here = present()
    others = [gpu for gpu in here.gpus if gpu.vendor == target.vendor]
    found = "; ".join(map(str, others)) or here.missing[target.vendor]
    fits = sorted({fitting.name for gpu in others if (fitting := target_of(gpu)) not in (None, target)})
    number = f" with number {on[4:]}" if ":" in on else ""
    other = f"compile for {' or '.join(fits)}, or " if fits else ""
    return (
        f"no GPU{number} here runs {target.name} ({target.arch})\n  found: {found}\n"
        f"  {other}use the emulator, which runs the same source on the CPU: on='emulator', or --on emulator"
    )
