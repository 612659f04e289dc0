"""The manifests, alerts, dashboards and operations handbook, held to the code without a cluster."""
