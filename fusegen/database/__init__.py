"""What was measured of candidates, and which of them to take because of it.

    keys      what a measurement is about: graph, sizes, layout, GPU
    rows      one measurement, its checks, and its line of text
    store     the user's file, shared by many processes
    lookup    from the candidates of a chain to the one that measured best

The planner knows nothing of it: it ranks by estimate, and `choose` puts the measured candidate first.
"""

from fusegen.database.keys import Problem, Tools, bucket, family, graph_digest, problem_of
from fusegen.database.lookup import Choice, Hit, choose, read_shipped
from fusegen.database.rows import Measurement, Unsound, better, read_lines, write_lines
from fusegen.database.store import Database, Merged, Unreadable, default_path

__all__ = [
    "Choice", "Database", "Hit", "Measurement", "Merged", "Problem", "Tools", "Unreadable", "Unsound", "better",
    "bucket", "choose", "default_path", "family", "graph_digest", "problem_of", "read_lines", "read_shipped",
    "write_lines",
]  # fmt: skip
