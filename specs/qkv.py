"""The three projections of attention with grouped keys and values, as one kernel."""

from fusegen import bf16, chain, dims

M, D, Q, G = dims("M D Q G")


@chain(M=4096, D=4096, Q=4096, G=1024)
def qkv(
    x: bf16[M, D], wq: bf16[Q, D], wk: bf16[G, D], wv: bf16[G, D],
) -> tuple[bf16[M, Q], bf16[M, G], bf16[M, G]]:  # fmt: skip
    """x @ [wq | wk | wv].T, each into an array of its own."""
    return x @ wq.T, x @ wk.T, x @ wv.T
