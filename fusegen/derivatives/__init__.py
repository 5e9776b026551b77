"""The gradients of a chain as a chain: `derive(chain)`, by reverse mode over its op graph."""

from fusegen.derivatives.chains import DERIVED, derive

__all__ = ["DERIVED", "derive"]
