"""Runtime of the ranks: waits with a time limit, status in shared memory, reusable communicators."""
