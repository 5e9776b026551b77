"""The functions of `fusegen.ops` that are layers of networks: norms of groups and batches, rotations, a divergence.

Each is the textbook formula of ops and views that there are.
"""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.axes import LAST, Axis, Over, axes_of, count, reduce
from fusegen.language.demands import as_f32, need_eps
from fusegen.language.elementwise import exp, log, need_traced, rsqrt, square, where
from fusegen.language.rearranging import concat, rearrange, split, stack
from fusegen.language.sizes import evenly
from fusegen.language.trace import Value, caller, composite
from fusegen.language.types import Size, shape_text


@composite
def groupnorm(
    x: Value, groups: Size, gamma: Value | None = None, beta: Value | None = None, eps: float = 1e-5
) -> Value:
    """(x - mean) / sqrt(var + eps) * gamma + beta of x: [B, C, ...], by the mean and variance of each batch's groups of
    C / groups channels (Wu & He 2018). gamma and beta: [C]."""
    need_channels("groupnorm", x, gamma, beta)
    need_eps("groupnorm", eps)
    if isinstance(groups, bool) or not isinstance(groups, Size):
        raise SpecError(f"groupnorm: groups={groups!r} is no size, such as 32 or a dim", caller())
    channels = x.shape[1]
    if isinstance(channels, int) and isinstance(groups, int) and (groups < 1 or channels % groups):
        raise SpecError(f"groupnorm: {channels} channels are no {groups} groups of one size", caller())
    x = as_f32(x)
    axes = [f"s{n}" for n in range(len(x.shape) - 2)]
    inner = " ".join(axes)
    in_groups = rearrange(x, f"b (g c) {inner} -> b g (c {inner})", g=groups)
    mean = reduce("sum", in_groups, LAST) / count(in_groups, LAST)
    variance = reduce("sum", square(in_groups - mean), LAST) / count(in_groups, LAST)
    rstd = rsqrt(variance + eps)
    if gamma is None and beta is None:  # rows are groups to the end
        sizes = dict(zip(axes, x.shape[2:], strict=True))
        return rearrange((in_groups - mean) * rstd, f"b g (c {inner}) -> b (g c) {inner}", **sizes)
    per_channel = rearrange(x, f"b (g c) {inner} -> b g c {inner}", g=groups)
    one_each = (..., *(None,) * (len(x.shape) - 2))
    normalized = (per_channel - mean[one_each]) * rstd[one_each]
    if gamma is not None:
        normalized = normalized * rearrange(gamma, "(g c) -> g c", g=groups)[one_each]
    if beta is not None:
        normalized = normalized + rearrange(beta, "(g c) -> g c", g=groups)[one_each]
    return rearrange(normalized, f"b g c {inner} -> b (g c) {inner}")


@composite
def batchnorm(
    x: Value, mean: Value, var: Value, gamma: Value | None = None, beta: Value | None = None, eps: float = 1e-5
) -> Value:
    """(x - mean) / sqrt(var + eps) * gamma + beta of x: [B, C, ...], with the channels' statistics known, as in
    inference (Ioffe & Szegedy 2015). All but x: [C]."""
    need_channels("batchnorm", x, mean, var, gamma, beta)
    need_eps("batchnorm", eps)
    x = as_f32(x)
    centered = x - beside(mean, x)
    normalized = centered * rsqrt(beside(var, x) + eps)
    return affine(normalized, gamma, beta)


def affine(normalized: Value, gamma: Value | None, beta: Value | None) -> Value:
    """normalized * gamma + beta, channel by channel."""
    scaled = normalized if gamma is None else normalized * beside(gamma, normalized)
    return scaled if beta is None else scaled + beside(beta, normalized)


def beside(channels: Value, x: Value) -> Value:
    """[C] as it meets x: [B, C, ...]."""
    return channels[(..., *(None,) * (len(x.shape) - 2))] if len(x.shape) > 2 else channels


def need_channels(name: str, x: Value, *vectors: Value | None) -> None:
    need_traced(name, x)
    if len(x.shape) < 2:
        raise SpecError(f"{name}: found x: {shape_text(x.shape)}, wanted batches and channels, [B, C, ...]", caller())
    for vector in vectors:
        if vector is not None and (not isinstance(vector, Value) or vector.shape != x.shape[1:2]):
            found = shape_text(vector.shape) if isinstance(vector, Value) else repr(vector)
            wanted = shape_text(x.shape[1:2])
            raise SpecError(f"{name}: found {found}, wanted one value a channel, {wanted}, as x has them", caller())


@composite
def rope(x: Value, cos: Value, sin: Value, interleaved: bool = False) -> Value:
    """x: [..., D] with pairs of each head rotated by angles whose cos and sin are [..., D // 2] (Su et al. 2021).

    Pairs are a head's halves, as in GPT-NeoX and Llama, or with interleaved=True neighbours, as in the paper and GPT-J.
    """
    for value in (x, cos, sin):
        need_traced("rope", value)
    half = evenly(x.shape[-1], 2) if x.shape else 0
    if not x.shape or any(value.shape[-1:] != (half,) for value in (cos, sin)):
        found = " and ".join(shape_text(value.shape) for value in (cos, sin))
        raise SpecError(
            f"rope: found cos and sin of {found} beside x of {shape_text(x.shape)}, wanted one angle a pair, "
            f"[..., {half}]\n  of a table with every angle twice take half: cos[..., : D // 2]",
            caller(),
        )
    if interleaved:
        even, odd = x[..., ::2], x[..., 1::2]
        rotated = stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        names = " ".join(f"a{n}" for n in range(len(rotated.shape) - 2))
        return rearrange(rotated, f"{names} pair two -> {names} (pair two)")
    low, high = split(x, 2)
    return concat([low * cos - high * sin, high * cos + low * sin])


@composite
def kl_div(log_q: Value, p: Value, log_target: bool = False, axis: Axis = -1, over: Over = None) -> Value:
    """sum(p * (log(p) - log_q)) over the last axis, or over others (see F.sum): the Kullback-Leibler divergence of p
    from q, whose logarithm is given. Where p is 0 a term is 0. With log_target=True p is given as its logarithm too."""
    need_traced("kl_div", p)
    log_p = p if log_target else log(p)
    probability = exp(p) if log_target else as_f32(p)
    terms = where(probability == 0.0, 0.0, probability * (log_p - log_q))
    return reduce("sum", terms, axes_of("kl_div", terms, axis, over))
