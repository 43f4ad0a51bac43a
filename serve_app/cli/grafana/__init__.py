"""The Grafana files of `serve-app dashboards`, and the address of a Grafana."""
