"""The ``staged`` path: GPU arrays through page-locked host memory."""
