"""Arrays on the CPU, a kernel on a GPU: copy there, run, copy back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fusegen.language.graph import Tensor
from fusegen.runtime.arrays import CPU, ArrayView, view
from fusegen.runtime.calls import Prepared
from fusegen.runtime.devices import Device
from fusegen.runtime.libraries import library


class Callee(Protocol):
    """What a call with copies asks of a kernel."""

    device: Device
    inputs: tuple[Tensor, ...]

    def check(self, views: Mapping[str, ArrayView]) -> object: ...

    def check_overlap(self, views: Mapping[str, ArrayView]) -> object: ...

    def prepared(
        self, views: Mapping[str, ArrayView], arrays: Sequence[Any], outs: tuple[Any, ...], values: tuple[float, ...],
        device: Device, owner: str, stream: int | None, signature: None,
    ) -> Prepared: ...  # fmt: skip


def run_copied(
    kernel: Callee, views: Mapping[str, ArrayView], values: tuple[float, ...], outs: tuple[Any, ...], owner: str
) -> Any:
    """The call over `views`, which are on the CPU; results are `outs` or fresh arrays of `owner`. Complete on return.

    Raises ArgumentError for the same arrays as a call without copies does.
    """
    kernel.check(views)
    if outs:
        kernel.check_overlap(views)
    device = kernel.device
    there: dict[str, ArrayView] = {}
    for tensor in kernel.inputs:
        host = views[tensor.name]
        memory = device.empty(host.size * host.dtype.bytes)
        memory.write(host.numpy())
        there[tensor.name] = memory.view(host.dtype, host.shape)
    prepared = kernel.prepared(there, tuple(there.values()), (), values, device, "fusegen", 0, None)
    prepared()
    device.synchronize(0)
    results = outs or tuple(library(owner, CPU).maker(a.shape, a.dtype, CPU, None)((), None) for a in prepared.outputs)
    for result, array in zip(results, prepared.outputs, strict=True):
        raw = array.owner.read()
        host = replace(view(result), writable=True)  # a fresh JAX array is immutable to everyone else
        host.numpy()[...] = raw.view(array.dtype.numpy).reshape(array.shape)
    return results[0] if len(results) == 1 else results
