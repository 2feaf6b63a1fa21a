"""Exact per-example gradients of whatever trains, clipped and summed: the one home of hooks."""
