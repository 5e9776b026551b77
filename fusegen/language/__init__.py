"""What a chain means: types, ops, tracing, the op graph, and its numpy and torch texts."""
