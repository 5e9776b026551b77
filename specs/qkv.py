"""The three projections of attention with grouped keys and values, as one kernel."""

from fusegen import bf16, chain, dims

B, S, D, Q, G = dims("B S D Q G")


@chain(B=2, S=2048, D=4096, Q=4096, G=1024)
def qkv(
    x: bf16[B, S, D], wq: bf16[Q, D], wk: bf16[G, D], wv: bf16[G, D],
) -> tuple[bf16[B, S, Q], bf16[B, S, G], bf16[B, S, G]]:  # fmt: skip
    """x @ [wq | wk | wv].T, each into an array of its own."""
    return x @ wq.T, x @ wk.T, x @ wv.T
