"""What `serve-app top` shows: figures of gateways, from Prometheus or from exporters, beside what the limiter sees."""
