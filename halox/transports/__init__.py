"""The data paths: one module each, behind one interface (`halox.transports.base.Channel`)."""
