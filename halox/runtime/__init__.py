"""Ranks and what they share: waits with a limit, status in shared memory, communicators kept for the next grid."""
