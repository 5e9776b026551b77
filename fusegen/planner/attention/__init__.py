"""Attention: two products with a softmax or steps of single elements between them, as one kernel."""
