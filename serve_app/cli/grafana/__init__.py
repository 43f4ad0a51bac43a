"""What `serve-app dashboards` does: the shipped dashboards and rules, the plan of a push, Grafana's API and files."""
