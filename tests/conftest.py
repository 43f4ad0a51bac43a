"""For all tests: what hypothesis draws is the same in every run, and a busy machine is no failure."""

from hypothesis import HealthCheck, settings

settings.register_profile("serve-app", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("serve-app")
