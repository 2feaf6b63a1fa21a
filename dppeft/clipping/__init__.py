"""Exact per-example gradients of whatever trains, clipped and summed. The only place that meets hooks."""
