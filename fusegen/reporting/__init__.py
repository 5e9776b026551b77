"""A report: all that is known of a chain's kernels as one page of HTML, which needs no network, and as JSON."""
