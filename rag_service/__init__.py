"""What the service is: configuration, HTTP, the pipeline of a request, telemetry and the command line."""

__version__ = "0.1.0"
