"""One private update in the order of the paper, and the loops around it."""
