"""What `serve-app dashboards` puts into a Grafana, and where that is."""
