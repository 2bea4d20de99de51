"""The only place that knows an implementation. Runs in a stack's own environment, never in the driver."""
