"""The Grafana dashboards, one JSON file each, written by `python -m dashboards`."""
