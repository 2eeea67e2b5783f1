"""GPU runtime: CUDA, memory, streams, events, compilation and launches."""
