"""The Grafana dashboards, as code: `python -m dashboards` writes them to `serve_app/boards`."""
