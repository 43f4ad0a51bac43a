"""The operator's command line, `serve-app`. It talks to the service's admin API over HTTP and to nothing else."""
