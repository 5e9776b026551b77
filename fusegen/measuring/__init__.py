"""Times, counters and bytes on a GPU, beside those of other libraries."""
