"""Attention of one token of each sequence to its KV cache, beside torch's own, in one run.

    python benchmarks/decode.py                     # 8 heads of keys, 4 of queries each, of 128, at several sizes
    python benchmarks/decode.py --dealt 128x4 64x8  # with so many keys dealt at a time, to so many parts, too
    python benchmarks/decode.py --pages 16 64       # and with keys and values in pages of so many, anywhere in a pool
    python benchmarks/decode.py --layer             # and specs/decoder_layer.py, replayed as a graph
    python benchmarks/decode.py --latent            # specs/mla_decode.py alone: 128 heads that read one row of 576

Bytes of keys and values, as a share of the rate of a plain copy in the same run. Peers: torch's
scaled_dot_product_attention by FlashAttention and cuDNN, the queries that share keys as rows of one head, which is how
they are fastest. Medians of one stopwatch, L2 cold. `apart`: the distance from cuDNN's result, relative L2. Run from
the repository root on a GPU, in an environment with torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from fusegen.language.spec import load_chains  # noqa: E402
from fusegen.language.types import size_of  # noqa: E402
from fusegen.measuring.timing import Stopwatch  # noqa: E402
from fusegen.pipeline import compile_program  # noqa: E402
from fusegen.planner.attention.parts import AttentionPlan  # noqa: E402
from fusegen.planner.programs.search import cheapest  # noqa: E402
from fusegen.runtime import finding  # noqa: E402
from fusegen.targets import target  # noqa: E402

SHAPES = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (64, 8192), (64, 32768))  # sequences, keys of each
LATENT = ((1, 8192), (8, 8192), (8, 32768), (64, 4096), (64, 8192), (128, 4096))
HEADS, QUERIES, WIDTH = 8, 4, 128
REPEATS = 15


def chain_of(name: str) -> Any:
    (found,) = load_chains(f"{ROOT / 'specs' / name}.py:{name}")
    return found


def programs(chain: Any, wanted: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    yield "", fusegen.compile(chain, wanted.target, validate=False, tuned=False)
    for dealt in wanted.dealt:
        tile, parts = (int(n) for n in dealt.split("x"))
        plan = cheapest(chain.graph, target(wanted.target), dealt=(tile, parts))
        yield f" {dealt}", compile_program(plan, on="gpu", validate=False, tuned=False, as_planned=True)


def how(program: Any) -> str:
    """Its attention, and to how many parts keys are dealt, or that its products are apart."""
    plans = [step.plan for step in program.plan.steps] if hasattr(program.plan, "steps") else [program.plan]
    said = f"said {sum(p.cost.time_us for p in plans):.1f}"
    for plan in plans:
        if isinstance(plan, AttentionPlan):
            return f"{plan.configuration}, {plan.parts or 1} parts, {said}"
    return f"{len(plans)} kernels, products apart, {said}"


def measure(torch: Any, watch: Stopwatch, wanted: argparse.Namespace) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    rate = watch.copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e6:.2f} TB/s", flush=True)
    for batch, keys in SHAPES:
        q = torch.randn(batch, HEADS, QUERIES, WIDTH, device="cuda").bfloat16()
        k, v = (torch.empty(batch, HEADS, keys, WIDTH, device="cuda", dtype=q.dtype).normal_() for _ in "kv")
        length = torch.full((batch, 1, 1, 1), keys, device="cuda", dtype=torch.int32)
        expected = scaled_dot_product_attention(q, k, v).float()

        def say(what: str, us: float, more: str = "", size: int = 4 * k.numel(), at: str = f"{batch} x {keys}") -> None:
            print(f"{at:12} {what:22} {us:8.1f} us  {size / us / rate:5.2f} of a copy  {more}", flush=True)

        def peer(stream: Any, q: Any = q, k: Any = k, v: Any = v) -> Any:
            return scaled_dot_product_attention(q, k, v)

        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    us = watch.time([peer], REPEATS).median
                say(f"torch {name.split('_')[0].lower()}", us)
            except Exception as error:  # a torch that has no such attention is a finding
                print(f"  {name}: {type(error).__name__}: {str(error)[:120]}")
        chain = chain_of("decode_attention").at(B=batch, G=HEADS, R=QUERIES, T=keys, D=WIDTH)
        for what, program in programs(chain, wanted):
            out = program(q, k, v, length)
            apart = float((out.float() - expected).norm() / expected.norm())
            us = watch.time([program.prepare(q, k, v, length, out=out)], REPEATS).median
            say(f"fusegen{what}", us, f"{how(program)}, apart {apart:.1e}")
        k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
        ones = torch.ones(HEADS, 1, 1, device="cuda")
        expected8 = scaled_dot_product_attention(q, k8.to(q.dtype), v8.to(q.dtype)).float()
        chain = chain_of("kv8_attention").at(B=batch, G=HEADS, R=QUERIES, T=keys, D=WIDTH)
        for what, program in programs(chain, wanted):
            out = program(q, k8, v8, ones, ones, length)
            apart = float((out.float() - expected8).norm() / expected8.norm())
            us = watch.time([program.prepare(q, k8, v8, ones, ones, length, out=out)], REPEATS).median
            say(f"fusegen f8e4m3{what}", us, f"{how(program)}, apart {apart:.1e}", size=2 * k8.numel())
        for rows in wanted.pages:
            chain = chain_of("paged_attention").at(B=batch, G=HEADS, R=QUERIES, P=keys // rows, L=rows, D=WIDTH)
            table = torch.randperm(batch * keys // rows, device="cuda", dtype=torch.int32).reshape(batch, -1)
            pools = [torch.empty(table.numel(), rows, HEADS, WIDTH, device="cuda", dtype=q.dtype) for _ in "kv"]
            for pool, x in zip(pools, (k, v), strict=True):
                pool[table.long()] = x.reshape(batch, HEADS, -1, rows, WIDTH).permute(0, 2, 3, 1, 4)
            for what, program in programs(chain, wanted):
                out = program(q, *pools, table, length)
                apart = float((out.float() - expected).norm() / expected.norm())
                us = watch.time([program.prepare(q, *pools, table, length, out=out)], REPEATS).median
                say(f"fusegen pages {rows}{what}", us, f"{how(program)}, apart {apart:.1e}")


def measure_latent(torch: Any, watch: Stopwatch, wanted: argparse.Namespace) -> None:
    """Bytes of the latent rows, which are all but nothing beside the floor of the products at many sequences."""
    from torch.nn.functional import scaled_dot_product_attention

    rate = watch.copy_rate()
    for batch, keys in LATENT:
        q = torch.randn(batch, 128, 576, device="cuda").bfloat16()
        kv = torch.empty(batch, keys, 576, device="cuda", dtype=q.dtype).normal_()
        length = torch.full((batch, 1, 1), keys, device="cuda", dtype=torch.int32)

        def peer(stream: Any, q: Any = q, kv: Any = kv) -> Any:
            return scaled_dot_product_attention(q[:, None], kv[:, None], kv[:, None, :, :512], scale=192**-0.5)[:, 0]

        expected = peer(None).float()
        flop = 2 * batch * 128 * keys * (576 + 512)

        def say(
            what: str, us: float, more: str = "", read: int = 2 * kv.numel(), flop: int = flop,
            at: str = f"latent {batch} x {keys}",
        ) -> None:  # fmt: skip
            share, rest = read / us / rate, f"{flop / us / 1e6:6.0f} TFLOP/s  {more}"
            print(f"{at:18} {what:14} {us:8.1f} us  {share:5.2f} of a copy {rest}", flush=True)

        say("torch", watch.time([peer], REPEATS).median)
        for what, program in programs(chain_of("mla_decode").at(B=batch, T=keys), wanted):
            out = program(q, kv, length)
            apart = float((out.float() - expected).norm() / expected.norm())
            us = watch.time([program.prepare(q, kv, length, out=out)], REPEATS).median
            say(f"fusegen{what}", us, f"{how(program)}, apart {apart:.1e}")


def measure_layer(torch: Any, watch: Stopwatch, wanted: argparse.Namespace) -> None:
    for batch in (1, 8, 16):
        chain = chain_of("decoder_layer").at(B=batch)
        sizes = chain.graph.sizes
        given = []
        for t in chain.graph.inputs:
            shape = [size_of(size, sizes) for size in t.shape]
            if t.name == "position":
                x = torch.full(shape, sizes["T"] - 1, device="cuda", dtype=torch.int32)
            elif t.name == "slots":
                x = torch.arange(1, batch + 1, device="cuda", dtype=torch.int32).reshape(shape) * sizes["T"] - 1
            else:
                x = torch.randn(shape, device="cuda").to(torch.bfloat16 if str(t.dtype) == "bf16" else torch.float32)
                x *= shape[-1] ** -0.5 if len(shape) == 2 and shape[0] >= sizes["D"] else 1
            given.append(x)
        for what, program in programs(chain, wanted):
            us = watch.time([launched(program.graph(*given))], REPEATS).median
            said = f"{len(program.plan.launches)} launches, {how(program)}"
            print(f"decoder_layer{what}, {batch} sequences of {sizes['T']}: {us:.1f} us as a graph, {said}", flush=True)


def launched(call: Callable[[], Any]) -> Callable[[Any], Any]:
    """As the stopwatch calls it, with a stream: torch's own is the one."""
    return lambda stream: call()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--dealt", nargs="*", default=[], metavar="KEYSxPARTS", help="128x4: 128 keys a time, 4 parts")
    parser.add_argument("--pages", nargs="*", type=int, default=[], metavar="KEYS", help="of a page: 16 64")
    parser.add_argument("--layer", action="store_true", help="specs/decoder_layer.py too")
    parser.add_argument("--latent", action="store_true", help="specs/mla_decode.py alone")
    wanted = parser.parse_args()
    import torch

    watch = Stopwatch(finding.find(target(wanted.target), "gpu"))
    if wanted.latent:
        measure_latent(torch, watch, wanted)
        return 0
    measure(torch, watch, wanted)
    if wanted.layer:
        measure_layer(torch, watch, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
