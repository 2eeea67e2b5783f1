"""The data paths: one module each, behind one interface (`halox.paths.base.Channel`)."""
