"""How the service is spread over processes: the only package that imports Ray."""
