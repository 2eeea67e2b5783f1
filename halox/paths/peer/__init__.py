"""The ``peer`` path: one kernel an exchange, through mapped memory of other GPUs."""
